"""A folder holds data: its code never runs, and what is wrong in a file is one line about it."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamwright.errors import InputError, NotFiniteError, UnsupportedModelError
from beamwright.models.hf_config import read_eos_ids, read_shape
from beamwright.models.hub import resolve_folder
from beamwright.models.load import inspect_model, load_model, read_reference
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import ModelSettings

EVIL = "open({path!r}, 'w').close()\nclass Evil:\n    pass\n"


@pytest.fixture
def folder(generator_folder, tmp_path):
    """A copy of the tiny checkpoint, to be spoilt."""
    return shutil.copytree(generator_folder, tmp_path / "model")


def change(file, **keys):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **keys}))


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
    change(folder / "config.json", model_type=model_type, auto_map={"AutoConfig": "evil.Evil"})
    with pytest.raises(UnsupportedModelError, match="wants to run its own code"):
        load_model(str(folder), ModelSettings())
    with pytest.raises(UnsupportedModelError, match="wants to run its own code"):
        inspect_model(ModelSettings(model=str(folder)))
    assert not ran.exists()


def test_code_beside_a_known_architecture_is_not_looked_at(folder, ran):
    """As with published reward models, whose classes are llamas and Qwens with a head."""
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = dict.fromkeys(kinds, "evil.Evil")
    change(folder / "config.json", auto_map=auto_map)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    assert load_model(str(folder), ModelSettings()).codec is not None
    read_reference(folder, torch.float32)
    assert not ran.exists()


def test_a_tokenizer_that_is_code_is_refused(folder, ran):
    (folder / "tokenizer.json").unlink()
    keys = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    change(folder / "tokenizer_config.json", **keys)
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        TextCodec.load(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 3}, ""),  # the head's width is no whole number then
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, ""),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 10**40}, ""),
        ({"vocab_size": True}, "vocab_size"),
        ({"intermediate_size": [48]}, "intermediate_size"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"max_position_embeddings": "1024"}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_act": ["silu"]}, ""),
        ({"hidden_act": None}, ""),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": 10**9}, "head_dim"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, ""),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}}, ""),
        ({"rope_parameters": "fast"}, ""),
        ({"model_type": ["llama"]}, ""),
        ({"model_type": {}}, ""),
    ],
)
def test_a_config_that_no_model_can_be_made_of(folder, keys, named):
    change(folder / "config.json", **keys)
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
    change(folder / "generation_config.json", eos_token_id=eos)
    change(folder / "config.json", eos_token_id=None)
    assert not read_eos_ids(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_a_pipe_among_the_files_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match=name):
        resolve_folder(str(folder), "generator")


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="Linux's")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_a_file_of_the_systems_that_has_no_size_is_not_read_for_ever(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/pagemap")  # as /proc/kmsg, but for anybody
    with pytest.raises(InputError, match=f"{name}: not a regular file"):
        resolve_folder(str(folder), "generator")


def spoil_tokenizer(folder, normalizer):
    change(folder / "tokenizer.json", normalizer=normalizer)


def test_a_tokenizer_that_panics_is_one_line(folder):
    spoil_tokenizer(folder, {"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(InputError, match=r"cannot be read \(tokenizer.json: damaged, or") as caught:
        TextCodec.load(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_panics_over_a_text_is_one_line(folder):
    class Panics:
        def encode_batch(self, *given, **named):
            raise PanicException("called `Option::unwrap()`\non a `None` value")

    PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with pytest.raises(InputError, match=r"tokenizer: PanicException: called .* value") as caught:
        TextCodec(Panics()).encode("text")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", [{"String": "q"}, {"Regex": "q"}])
def test_a_tokenizer_that_multiplies_text_is_refused(folder, pattern):
    each = {"type": "Replace", "pattern": pattern, "content": "a" * 30}
    spoil_tokenizer(folder, each)
    TextCodec.load(folder)
    spoil_tokenizer(folder, {"type": "Sequence", "normalizers": [each, each]})
    with pytest.raises(InputError, match=r"normalizer makes 900 characters of one"):
        TextCodec.load(folder)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(folder, bad):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = bad
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NotFiniteError, match=r"model.layers.1.mlp.down_proj.weight.* damaged"):
        load_model(str(folder), ModelSettings())


def test_a_weight_that_overflows_in_a_narrow_dtype_names_the_dtype(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NotFiniteError, match=r"norm.weight does not fit into float16: use --dtype"):
        load_model(str(folder), ModelSettings(dtype="float16"))
    load_model(str(folder), ModelSettings())


def test_a_context_of_millions_costs_nothing_to_read(folder):
    change(folder / "config.json", max_position_embeddings=10**9)
    assert read_shape(folder, 512).context == 512
