"""A folder holds data: its code never runs, and what is wrong in a file is one line about it."""

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import fakes
from beamwright.errors import InputError, NotFiniteError, UnsupportedModelError
from beamwright.io import read_yaml
from beamwright.models.hf_config import read_eos_ids, read_shape
from beamwright.models.hub import resolve_folder
from beamwright.models.load import inspect_model, load_model, load_reference_model
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import ModelSettings

EVIL = "open({path!r}, 'w').close()\nclass Evil:\n    pass\n"


@pytest.fixture
def folder(generator_folder, tmp_path):
    """A copy of the tiny checkpoint, to be spoilt."""
    return shutil.copytree(generator_folder, tmp_path / "model")


@pytest.fixture
def ran(folder, monkeypatch):
    """A file that the folder's own code would leave behind; who asks a question fails."""
    trace = folder / "ran"
    (folder / "evil.py").write_text(EVIL.format(path=str(trace)))

    def asked(question=""):
        raise AssertionError(f"asked: {question}")

    monkeypatch.setattr("builtins.input", asked)
    return trace


@pytest.mark.parametrize("model_type", ["evil", None])
def test_code_in_a_models_folder_is_refused(folder, ran, model_type):
    fakes.change_json(
        folder / "config.json", model_type=model_type, auto_map={"AutoConfig": "evil.Evil"}
    )
    for load in (lambda settings: load_model(settings.model, settings), inspect_model):
        with pytest.raises(UnsupportedModelError, match=r"folder's own code .* is never run"):
            load(ModelSettings(model=str(folder)))
    assert not ran.exists()


def test_code_beside_a_known_architecture_is_not_looked_at(folder, ran):
    """As with published reward models, whose classes are llamas and Qwens with a head."""
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = dict.fromkeys(kinds, "evil.Evil")
    fakes.change_json(folder / "config.json", auto_map=auto_map)
    fakes.change_json(
        folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    )
    assert load_model(str(folder), ModelSettings()).codec is not None
    load_reference_model(folder, torch.float32)
    assert not ran.exists()


def test_a_tokenizer_that_is_code_is_refused(folder, ran):
    (folder / "tokenizer.json").unlink()
    keys = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    fakes.change_json(folder / "tokenizer_config.json", **keys)
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        TextCodec.load(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (key, value, key if of == "named" else "")
        for of, keys in read_yaml(Path(__file__).with_suffix(".yaml"), "tests").items()
        for key, values in keys.items()
        for value in values
    ],
)
def test_a_config_that_no_model_can_be_made_of(folder, key, value, named):
    fakes.change_json(folder / "config.json", **{key: value})
    with pytest.raises(InputError, match=f"(?s){folder.name}.*{named}") as caught:
        load_model(str(folder), ModelSettings())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["null", "[]", "3", "{", "[" * 100_000, "\ud800"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_object(folder, name, text):
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(InputError, match=name):
        load_model(str(folder), ModelSettings())


@pytest.mark.parametrize("eos", ["2", {"a": 1}, [[2]], True, -1, None, []])
def test_an_end_token_that_is_none_is_left_out(folder, eos):
    fakes.change_json(folder / "generation_config.json", eos_token_id=eos)
    fakes.change_json(folder / "config.json", eos_token_id=None)
    assert not read_eos_ids(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["a pipe", "/proc/self/pagemap"])  # as /proc/kmsg, but readable
def test_a_file_that_may_never_end_is_not_read(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(folder / name)
    elif os.path.exists(kind):
        (folder / name).symlink_to(kind)
    else:
        pytest.skip("Linux's")
    with pytest.raises(InputError, match=name):
        resolve_folder(str(folder), "generator")


def test_a_tokenizer_that_panics_over_a_text_is_one_line(folder):
    PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    panics = PanicException("called `Option::unwrap()`\non a `None` value")
    tokenizer = Mock(**{"encode_batch.side_effect": panics})
    with pytest.raises(InputError, match="tokenizer failed: PanicException") as caught:
        TextCodec(tokenizer).encode("text")
    assert "\n" not in str(caught.value)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "dtype", "complaint"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), "auto", "damaged"),
        ("model.layers.1.mlp.down_proj.weight", float("inf"), "auto", "damaged"),
        ("model.norm.weight", 1e5, "float16", "does not fit into float16: use --dtype"),
    ],
)
def test_a_weight_that_is_no_number_is_named(folder, name, bad, dtype, complaint):
    def spoil(tensors):
        tensors[name].view(-1)[3] = bad

    fakes.change_tensors(folder, spoil)
    with pytest.raises(NotFiniteError, match=f"{name}.* {complaint}"):
        load_model(str(folder), ModelSettings(dtype=dtype))
    if dtype != "auto":
        load_model(str(folder), ModelSettings())


def test_a_context_of_millions_costs_nothing_to_read(folder):
    fakes.change_json(folder / "config.json", max_position_embeddings=10**9)
    assert read_shape(folder, 512).context == 512
