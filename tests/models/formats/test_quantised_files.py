"""Quantised folders against the definition of their formats, and against the model they hold."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fakes
import packed_files
from beamwright import Solver
from beamwright.errors import InputError
from beamwright.models.formats import open_checkpoint
from beamwright.models.grouped import GroupedLinear
from beamwright.models.hf_config import read_shape
from beamwright.models.load import load_model
from beamwright.plan.costs import weight_bytes
from beamwright.sections import ModelSettings
from engines import projections
from models.formats.test_gguf import differs

SHAPE = {**fakes.SMALL, "hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2}


@pytest.fixture
def write(tmp_path):
    """Write a folder in a format; returns it, the model, and its projections' values."""

    def write(name, skip=()):
        fakes.write_tokenizer(tmp_path)
        model = fakes.write_checkpoint(tmp_path, Qwen2Config(**SHAPE))
        return tmp_path, model, packed_files.quantise(tmp_path, name, model, skip)

    return write


@pytest.mark.parametrize("name", packed_files.FORMATS)
def test_values_are_those_of_the_formats_definition(write, name):
    folder, model, meant = write(name)
    stored = open_checkpoint(folder)
    assert set(stored.sizes) == set(model.state_dict())
    for key, values in meant.items():
        found = stored.tensor(key)
        assert found.dtype == torch.float32
        assert (found - values).abs().max() <= 2e-7 * values.abs().max()  # one rounding of the sum
        linear = stored.quantised_linear(key.removesuffix(".weight"))
        assert (linear and linear.bits) == packed_files.KEPT.get(name)
        if linear is not None:  # beside 4 bits, scale and low have 11 bits
            most = 2**-10 if linear.bits == 4 else 2e-7
            assert (
                linear.dequantise(slice(None)) - values
            ).abs().max() <= most * values.abs().max()


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("name", packed_files.FORMATS)
def test_a_folder_is_the_model_that_it_means(write, name):
    folder, model, _ = write(name)
    assert differs(folder, model) < (5e-2 if packed_files.KEPT.get(name) == 4 else 2e-5)
    loaded = load_model(str(folder), ModelSettings(model=str(folder)))
    linears = projections(loaded.decoder)
    assert all(isinstance(each, GroupedLinear) for each in linears) == (name in packed_files.KEPT)
    others = loaded.decoder.shape.num_parameters - sum(
        out * into * count for out, into, count in loaded.decoder.shape.matrices
    )
    stored = sum(each.weight.nbytes for each in linears) + 4 * others
    assert weight_bytes(read_shape(folder, None), 4, loaded.storage) == stored


@pytest.mark.usefixtures("unpacked")
def test_projections_that_were_left_plain_stay_so(write):
    skip = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv"]
    folder, model, _ = write("gptq-4", skip)
    assert differs(folder, model) < 5e-2
    assert open_checkpoint(folder).quantised_linear("model.layers.0.self_attn.k_proj") is None


def test_experts_of_mxfp4_are_what_transformers_makes_of_them(tmp_path):
    draws = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 8, 4, 16), generator=draws, dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 8, 4), generator=draws, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = torch.ones(3, 8)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    stored = open_checkpoint(tmp_path)
    assert sorted(stored.sizes) == [name, f"{name}_bias"]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(stored.tensor(name), expected)
    assert torch.equal(stored.tensor(f"{name}_bias"), bias)


def test_a_version_that_is_not_read_is_named(write):
    folder, _, meant = write("awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"says \(AWQ version 'gemv' is not supported"):
        open_checkpoint(folder).tensor(next(iter(meant)))


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_a_verifiers_folder_is_read_as_a_generators(write, name):
    folder, _, _ = write(name)
    fakes.write_logit_pair_spec(folder)
    solver = Solver(
        model=str(folder), verifier=str(folder), n=2, width=2, max_rounds=2, step_tokens=4
    )
    found = solver.solve("1 + 1")
    assert all(0 < each.score < 1 for each in found.candidates)
