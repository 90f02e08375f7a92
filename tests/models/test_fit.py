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
from beamwright.models.formats.known import CONFIGS
from beamwright.models.load import inspect_model, load_model
from beamwright.sections import ModelSettings
from models.formats.test_gguf import differs

SMALL = {**fakes.SMALL, "hidden_size": 64, "num_key_value_heads": 2, "intermediate_size": 96}
ROPE = {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OPTIONS = {
    "qwen3_moe": MOE,
    "phi3": {"rope_parameters": ROPE, "original_max_position_embeddings": 64},
    "opt": {"word_embed_proj_dim": 64},
}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}


def compressed(*weights):
    groups = {f"group_{n}": {"targets": [], "weights": each} for n, each in enumerate(weights)}
    form = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {"quantization_config": {**form, "config_groups": groups}}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a folder of a family. change: from its tensors to those of the file, config: further
    keys of config.json, after: writes other files."""
    monkeypatch.setattr("beamwright.models.load.packer", lambda *_, **how: lambda linear: linear)

    def call(kind, change=lambda tensors: tensors, config=(), after=lambda folder, tensors: None):
        fakes.write_tokenizer(tmp_path)
        options = {**SMALL, **OPTIONS.get(kind, {}), "tie_word_embeddings": False}
        model = fakes.write_checkpoint(tmp_path, AutoConfig.for_model(kind, **options), noise=0.3)
        file, tensors = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
        file.write_text(json.dumps({**json.loads(file.read_text()), **dict(config)}))
        stored = {name: t.contiguous().clone() for name, t in change(tensors).items()}
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
        after(tmp_path, stored)
        model.load_state_dict(tensors, strict=False)  # what a change has made of them
        return tmp_path, model

    return call


# --- what is refused --------------------------------------------------------------------------

LEGACY = {"_use_new_zipfile_serialization": False}
Q_BIAS, Q_NORM = "model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_norm.weight"
MORE = {"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64), "lm_head.bias": torch.ones(261)}
UP, GATE = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate.weight"


def same(tensors):
    return tensors


def without(*names):
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def scaled_parts(tensors):
    codes = {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if "up_" in n}
    return {**tensors, **codes, **{f"{name}_scale": torch.ones(2) for name in codes}}


def shards(folder, tensors, index=(0, 1), names=("model-0000{}-of-00002.safetensors",), older=()):
    """The tensors in two files, of which `index` names some. older: files of other values."""
    (folder / "model.safetensors").unlink()
    parts = {names[0].format(n + 1): dict(list(tensors.items())[n::2]) for n in range(2)}
    stale = {file: {name: t * 2 for name, t in tensors.items()} for file in older}
    for file, content in {**stale, **parts}.items():
        save_file(content, folder / file)
    where = {name: list(parts)[n] for n in index for name in list(parts.values())[n]}
    if where:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def pickled(folder, tensors, parts=1, **how):
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **how)
        return
    where = {name: f"pytorch_model-{n % parts}.bin" for n, name in enumerate(tensors)}
    for file in {*where.values()}:
        torch.save({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


def adapter(folder, tensors):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def modelopt(algorithm):
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    return lambda at, _: (at / "hf_quant_config.json").write_text(json.dumps(said))


class Evil:
    def __reduce__(self):
        return exit, (3,)


REFUSED = {
    "no head": ("qwen2", without("lm_head.weight"), {}, r"lm_head.weight is missing: fetch all"),
    "no norm": ("llama", without("model.norm.weight"), {}, r"model.norm.weight is missing"),
    "no gate": ("qwen3_moe", without(GATE), {}, rf"{GATE} is missing"),
    "half": ("qwen2", lambda t: dict(list(t.items())[::2]), {}, r"missing \(and \d+ more\): fetch"),
    "PEFT": ("llama", lambda t: {f"base_model.model.{n}": v for n, v in t.items()}, {}, "by PEFT"),
    "narrow": ("llama", lambda t: {**t, UP: t[UP][:, :8]}, {}, r"\(96, 8\), config says"),
    "narrow, adapted": ("qwen3_moe", lambda t: {**t, "model.norm.weight": torch.ones(63)}, {},
                        r"model.norm.weight has shape \(63,\), config says \(64,\)"),
    "cut": ("llama", same, {}, r"model.safetensors: cannot be read", lambda f, _: (
        f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-10])),
    "nothing": ("llama", same, {}, r"no \*.safetensors", lambda f, _: [
        (f / "model.safetensors").unlink()]),
    **{f"pickle {number}": ("llama", same, {}, r"pytorch_model.bin: cannot be read",
                            lambda f, _, content=content: pickled(f, content))
       for number, content in enumerate(([torch.zeros(2)], {"a": 3}, torch.zeros(2), None))},
    "bias": ("llama", lambda t: {**t, Q_BIAS: torch.ones(64)}, {}, f"{Q_BIAS} is not one of"),
    "q_norm": ("qwen2", lambda t: {**t, Q_NORM: torch.ones(16)}, {}, f"{Q_NORM} is not one"),
    "depth": ("mistral", lambda t: t | MORE, {}, r"is not one of a mistral .* \(and 1 more\)"),
    "moe bias": ("qwen3_moe", lambda t: {**t, Q_BIAS: torch.ones(64)}, {}, f"{Q_BIAS} is not one"),
    "adapted": ("gemma2", lambda t: {**t, "extra.weight": torch.ones(2)}, {}, "extra.weight is"),
    "scales": ("llama", scaled_parts, {}, "_scale is not one of .* does not tell"),
    "parts": ("llama", scaled_parts, compressed(ROWS), r"up_proj.*scales \(2,\) .* take the orig"),
    "no tokenizer": ("llama", same, {}, "no tokenizer in this folder", lambda f, _: [
        file.unlink() for file in f.glob("tokenizer*")]),
    "no method": ("llama", same, {"quantization_config": {"bits": 4}}, "by an unknown method are"),
    "a format": ("llama", same, {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}, "nvfp4"),
    "MLX": ("llama", same, {"quantization": {"bits": 4}}, "quantised by MLX are not read"),
    "rotated": ("llama", same, {"quantization_config": {
        **compressed(ROWS)["quantization_config"], "transform_config": {"config_groups": {"R4": 1}},
    }}, r"transform_config.config_groups.R4': rotations"),
    "NVFP4": ("llama", same, {}, "modelopt NVFP4 are not read", modelopt("NVFP4")),
    "index": ("llama", same, {}, r"lm_head|missing", lambda *at: shards(*at, index=(0,))),
    "set": ("llama", same, {}, r"which of its files are the model\? model-00001-of-00003",
            lambda *at: shards(*at, (), ("model-0000{}-of-00003.safetensors",))),
    "gone": ("llama", same, {}, r"shard model-00002-of-00002.safetensors is missing", lambda f, t: [
        shards(f, t), (f / "model-00002-of-00002.safetensors").unlink()]),
    "outside": ("llama", same, {"transformers_weights": "../x.safetensors"}, r"x.safetensors is m"),
    "LoRA alone": ("llama", same, {}, r"an adapter .* of org/base: merge it", lambda *at: [
        adapter(*at), (at[0] / "config.json").unlink()]),
    "code": ("llama", same, {}, r"_model.bin: cannot be read", lambda at, _: pickled(at, [Evil()])),
    "old code": ("llama", same, {}, r"_model.bin: cannot be read", lambda at, _: pickled(
        at, [Evil()], **LEGACY)),
    "LoRA": ("llama", same, {}, r"an adapter .* of org/base: merge it", adapter),
    "LFS": ("llama", same, {}, r"model.safetensors: .* git lfs pull", lambda f, t: (
        f / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")),
    "key": ("llama", same, {"rms_norm_eps": "small"}, r"config.json: rms_norm_eps cannot be"),
    "longrope": ("phi3", same, {}, "use --context 64 or less"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_doctor_and_by_loading_in_one_line(write, name):
    kind, change, config, complaint, *after = REFUSED[name]
    folder, _ = write(kind, change, config, *after)
    lines = set()
    for load in (lambda s: load_model(str(folder), s), inspect_model):
        with pytest.raises(InputError) as caught:
            load(ModelSettings(model=str(folder)))
        lines.add(str(caught.value))
    assert len(lines) == 1
    assert re.search(complaint, line := lines.pop())
    assert str(folder) in line
    assert "\n" not in line


# --- what is read -----------------------------------------------------------------------------


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


def of_all(name, weight):
    return (scale := weight.abs().max() / 448), scale


def of_blocks(name, weight):
    scale = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).abs().amax((1, 3)) / 448
    return scale, scale.repeat_interleave(32, 0).repeat_interleave(32, 1)


TIED, KV = {"tie_word_embeddings": True}, ["k_scale", "v_scale", "rotary_emb.inv_freq"]
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
SPARE = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in KV}
BOTH = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
READ = {
    **{f"{kind}, another head": (kind, same, TIED)
       for kind in ("llama", "mistral", "qwen2", "qwen3", "opt", "granite")},
    "a head that is tied": ("qwen2", lambda t: t | {
        "lm_head.weight": t["lm_head.weight"].copy_(t["model.embed_tokens.weight"])}, TIED),
    "older shards": ("qwen2", same, {}, lambda *at: shards(*at, older=BOTH)),
    "other names": ("qwen2", same, {}, lambda *at: shards(
        *at, names=("consolidated-{}.safetensors",), older=BOTH)),
    "named": ("qwen2", same, {"transformers_weights": "a.safetensors"}, lambda folder, tensors: (
        save_file(tensors, folder / "a.safetensors"), shards(folder, {"x": torch.ones(1)}))),
    "no index": ("llama", same, {}, lambda *at: shards(*at, index=())),
    "old pickle": ("llama", same, {}, lambda *at: pickled(*at, **LEGACY)),
    "pickle": ("opt", same, {}, pickled),
    "pickles": ("llama", same, {}, lambda *at: pickled(*at, parts=3)),
    "an OPT of before": ("opt", lambda t: {n.removeprefix("model."): v for n, v in t.items()}, {}),
    "window of a llama": ("llama", same, {"sliding_window": 16}),
    "biases of a mistral": ("mistral", same, {"attention_bias": True, "mlp_bias": True}),
    "a ministral": ("mistral", same, {"layer_types": ["full_attention"] * 2}),
    "dynamic": ("llama", same, {"rope_parameters": DYNAMIC}),
    "dynamic, adapted": ("gemma", same, {"rope_parameters": DYNAMIC}),
    "longrope": ("phi3", same, {}),
    "rows": ("llama", lambda t: eight_bits(
        t, lambda *at: (of_rows(*at)[1].flatten(), of_rows(*at)[1])), compressed(ROWS)),
    "two groups": ("llama", lambda t: eight_bits(
        t, lambda n, w: (of_blocks if "mlp" in n else of_rows)(n, w)), compressed(ROWS, BLOCKS)),
    "activations": ("gemma2", lambda t: eight_bits(
        t, of_all, "weight_scale_inv", ["activation_scale"]), FP8),
    "modelopt": ("llama", lambda t: eight_bits(t, of_all, more=["input_scale"]), {},
                 modelopt("FP8")),
    "KV in 8 bits": ("gemma2", lambda t: eight_bits(t, of_rows) | SPARE, compressed(ROWS)),
    "KV in 8 bits, own": ("llama", lambda t: eight_bits(t, of_rows) | SPARE, compressed(ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_the_model_that_it_means(write, name):
    kind, change, config, *after = READ[name]
    folder, model = write(kind, change, config, *after)
    settings = ModelSettings(model=str(folder), context=64)
    own = kind in CONFIGS and name != "a ministral"
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
    assert line == f"model {folder}: config.json has 'use_magic', which is not read"
    assert load_model(str(folder), settings).remarks == tuple(remarks)
    assert f"beamwright: {line}" in caplog.text
