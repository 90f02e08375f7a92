"""Damaged checkpoints: the error names the file or the tensor."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamwright.errors import InputError
from beamwright.models.load import load_model
from beamwright.sections import ModelSettings


def load(folder):
    return load_model(str(folder), ModelSettings())


def rewrite(folder, change):
    """Apply `change` to the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def complaint(folder):
    with pytest.raises(InputError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_weight_is_named(llama_folder, name):
    rewrite(llama_folder, lambda tensors: tensors.pop(name))
    assert f"{name} is missing" in complaint(llama_folder)


def test_a_wrong_shape_is_named_with_both_shapes(llama_folder):
    name = "layers.1.mlp.down_proj.weight"
    rewrite(llama_folder, lambda tensors: tensors.update({f"model.{name}": torch.zeros(32, 47)}))
    assert f"{name} has shape (32, 47), config says (32, 48)" in complaint(llama_folder)


def test_a_missing_shard_is_named(sharded_folder):
    shard = sorted(sharded_folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"shard {shard.name} is missing" in complaint(sharded_folder)


class _Evil:
    def __reduce__(self):
        return (os.mkdir, ("should-not-exist",))


def test_pickled_code_is_refused_and_not_run(llama_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (llama_folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Evil()}, llama_folder / "pytorch_model.bin")
    assert "pytorch_model.bin: cannot be read" in complaint(llama_folder)
    (llama_folder / "pytorch_model.bin").write_bytes(b"garbage" * 100)
    assert "pytorch_model.bin: cannot be read" in complaint(llama_folder)
    assert not (tmp_path / "should-not-exist").exists()
