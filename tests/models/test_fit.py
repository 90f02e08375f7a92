"""A folder is the model that it means, or one line says which tensor or key is in the way; `doctor`
says the same as loading."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import fakes
from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.models.formats.key_tables import CONFIGS
from beamwright.models.load import inspect_model, load_model
from beamwright.sections import ModelSettings
from models.formats.test_gguf import differs

SMALL = {**fakes.SMALL, "hidden_size": 64, "num_key_value_heads": 2, "intermediate_size": 96}
CASES = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")
REFUSED, READ = CASES["refused"], CASES["read"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a folder of a family. without, add: tensors, by name and size; tensors: what else is
    made of them; config: keys of its file; files: what is made of the folder."""
    monkeypatch.setattr(
        "beamwright.models.load.make_packer", lambda *_, **how: lambda linear: linear
    )

    def call(kind, without=(), add=(), tensors="kept", config=(), files="whole", how=(), **_):
        fakes.write_tokenizer(tmp_path)
        options = {**SMALL, **CASES["options"].get(kind, {}), "tie_word_embeddings": False}
        model = fakes.write_checkpoint(tmp_path, AutoConfig.for_model(kind, **options), noise=0.3)
        fakes.change_json(tmp_path / "config.json", **dict(config))
        held = load_file(tmp_path / "model.safetensors")
        found = {name: t for name, t in TENSORS[tensors](held).items() if name not in without}
        found |= {name: torch.ones(size) for name, size in dict(add).items()}
        found = {name: t.contiguous().clone() for name, t in found.items()}
        save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
        FILES[files](tmp_path, found, **dict(how))
        model.load_state_dict(held, strict=False)  # what a change has made of them
        return tmp_path, model

    return call


# --- what is made of tensors ------------------------------------------------------------------


def narrow(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    return {**tensors, name: tensors[name][:, :8]}


def scaled_parts(tensors):
    codes = {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if "up_" in n}
    return {**tensors, **codes, **{f"{name}_scale": torch.ones(2) for name in codes}}


def tied(tensors):
    head = tensors["lm_head.weight"].copy_(tensors["model.embed_tokens.weight"])
    return {**tensors, "lm_head.weight": head}


def eight_bits(tensors, scale_of, ending="weight_scale", more=()):
    """Layers' projections as FP8; `tensors` become what that means. more: endings beside them."""
    found = dict(tensors)
    for name in (each for each in tensors if each.endswith("proj.weight")):
        scale, wide = scale_of(name, tensors[name])
        found[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        tensors[name].copy_(found[name].float() * wide)
        stem = name.removesuffix("weight")
        found |= {stem + ending: scale, **{stem + each: torch.tensor(0.1) for each in more}}
    return found


def of_rows(name, weight):
    return (scale := weight.abs().amax(1, keepdim=True) / 448), scale


def of_flat_rows(name, weight):
    scale, _ = of_rows(name, weight)
    return scale.flatten(), scale


def of_all(name, weight):
    return (scale := weight.abs().max() / 448), scale


def of_rows_and_blocks(name, weight):
    if "mlp" not in name:
        return of_rows(name, weight)
    scale = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).abs().amax((1, 3)) / 448
    return scale, scale.repeat_interleave(32, 0).repeat_interleave(32, 1)


def bits(*how):
    return lambda tensors: eight_bits(tensors, *how)


TENSORS = {
    "kept": lambda tensors: tensors,
    "half of them": lambda tensors: dict(list(tensors.items())[::2]),
    "PEFT's": lambda tensors: {f"base_model.model.{n}": t for n, t in tensors.items()},
    "an OPT's of before": lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()},
    "narrow": narrow,
    "scaled parts": scaled_parts,
    "tied": tied,
    "8 bits": bits(of_rows),
    "8 bits, flat scales": bits(of_flat_rows),
    "8 bits, blocks": bits(of_rows_and_blocks),
    "8 bits, activations": bits(of_all, "weight_scale_inv", ["activation_scale"]),
    "8 bits, inputs": bits(of_all, "weight_scale", ["input_scale"]),
}


# --- what is made of folders ------------------------------------------------------------------


def without(folder, tensors, pattern):
    for file in folder.glob(pattern):
        file.unlink()


def shards(
    folder, tensors, index=(0, 1), name="model-0000{}-of-00002.safetensors", older=False, gone=()
):
    """The tensors in two files; `index` names some of those. older: beside some of other values."""
    (folder / "model.safetensors").unlink()
    parts = {name.format(n + 1): dict(list(tensors.items())[n::2]) for n in range(2)}
    double = {name: t * 2 for name, t in tensors.items()}
    stale = {f"model-0000{n}-of-00003.safetensors": double for n in (1, 2, 3) if older}
    for file, content in {**stale, **parts}.items():
        save_file(content, folder / file)
    where = {name: list(parts)[n] for n in index for name in list(parts.values())[n]}
    if where:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for file in gone:
        (folder / file).unlink()


def named(folder, tensors):
    save_file(tensors, folder / "a.safetensors")
    shards(folder, {"x": torch.ones(1)})


class Evil:
    def __reduce__(self):
        return exit, (3,)


CONTENTS = {
    **{"tensors": [torch.zeros(2)], "tensor": torch.zeros(2), "code": [Evil()]},
    **{"number": {"a": 3}, "nothing": None},
}


def pickled(folder, tensors, parts=1, content="all", legacy=False):
    """Its tensors, or something else. legacy: in the form of before."""
    (folder / "model.safetensors").unlink()
    if parts == 1:
        held = tensors if content == "all" else CONTENTS[content]
        how = {"_use_new_zipfile_serialization": False} if legacy else {}
        torch.save(held, folder / "pytorch_model.bin", **how)
        return
    where = {name: f"pytorch_model-{n % parts}.bin" for n, name in enumerate(tensors)}
    for file in {*where.values()}:
        torch.save({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


def adapter(folder, tensors, alone=False):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    if alone:
        (folder / "config.json").unlink()


def modelopt(folder, tensors, algorithm):
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))


def cut(folder, tensors):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def pointer(folder, tensors):
    written = b"version https://git-lfs.github.com/spec/v1\n"
    (folder / "model.safetensors").write_bytes(written)


MADE = (without, shards, named, pickled, adapter, modelopt, cut, pointer)
FILES = {each.__name__: each for each in MADE} | {"whole": lambda folder, tensors: None}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_doctor_and_by_loading_in_one_line(write, name):
    folder, _ = write(**REFUSED[name])
    lines = set()
    for load in (lambda s: load_model(str(folder), s), inspect_model):
        with pytest.raises(InputError) as caught:
            load(ModelSettings(model=str(folder)))
        lines.add(str(caught.value))
    assert len(lines) == 1
    assert re.search(REFUSED[name]["said"], line := lines.pop())
    assert str(folder) in line
    assert "\n" not in line


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_the_model_that_it_means(write, name):
    folder, model = write(**READ[name])
    settings = ModelSettings(model=str(folder), context=64)
    own = READ[name]["kind"] in CONFIGS and name != "a ministral"
    assert inspect_model(settings)["decoder"] == ("own" if own else "transformers")
    assert differs(folder, model, context=64) < 1e-4
    shape = load_model(str(folder), settings).decoder.shape
    assert shape.built or shape.tied == (name == "a head that is tied")


# --- keys -------------------------------------------------------------------------------------


def test_all_keys_of_published_configs_are_known():
    for name, said in json.loads(Path(__file__).with_name("config_keys.json").read_text()).items():
        assert CONFIGS[said["model_type"]].check(said["keys"].split(), name) == ()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_key_that_is_not_read_is_a_remark(write, caplog, kind):
    folder, _ = write(kind, config={"use_magic": True, "use_more": False, "rotary_emb": {}})
    remarks = inspect_model(settings := ModelSettings(model=str(folder)))["remarks"]
    (line,) = (each for each in remarks if "config.json" in each)
    assert line == f"model {folder}: config.json has 'use_magic', which is ignored"
    assert load_model(str(folder), settings).remarks == tuple(remarks)
    assert f"beamwright: {line}" in caplog.text
