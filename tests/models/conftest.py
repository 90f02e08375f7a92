"""Tiny random checkpoints of every family, odd ones included."""

from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

import fakes
from beamwright.io import read_yaml
from beamwright.models.native import blocks_to_groups

FAMILIES = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")


@pytest.fixture(scope="session")
def write_family(tmp_path_factory):
    """Write a family's checkpoint; returns its folder and the `transformers` model."""

    @cache
    def write(name):
        options, folder = {**FAMILIES["every"], **FAMILIES[name]}, tmp_path_factory.mktemp(name)
        kind, size = options.pop("kind"), options.pop("max_shard_size", "5GB")
        options["vocab_size"] = fakes.VOCAB + 5  # more than the tokenizer has, as in real models
        config = AutoConfig.for_model(kind, **options)
        fakes.write_tokenizer(folder)
        return folder, fakes.write_checkpoint(folder, config, max_shard_size=size)

    return write


@pytest.fixture
def llama_folder(tmp_path):
    """A Llama checkpoint that a test may damage."""
    fakes.write_tokenizer(tmp_path)
    config = LlamaConfig(**fakes.SMALL, num_key_value_heads=2)
    fakes.write_checkpoint(tmp_path, config)
    return tmp_path


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", [name for name in FAMILIES if name != "every"])


@pytest.fixture
def unpacked(monkeypatch):
    """Weights as they were read, in groups: packed ones can neither be compared nor counted."""
    monkeypatch.setattr("beamwright.models.native.library", lambda: None)
    monkeypatch.setattr("beamwright.models.load.make_packer", lambda *_, **how: blocks_to_groups)


@pytest.fixture
def few_parts(monkeypatch):
    """Of two parts, so that small sums have several programs, too."""
    monkeypatch.setattr("beamwright.models.streaming._UNITS", 4)
