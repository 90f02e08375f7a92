"""The decoder against `transformers`, for every family and backend."""

import pytest
import torch

import fakes
from beamwright.checks.model import check_parity
from beamwright.errors import UnavailableError
from beamwright.models.load import inspect_model, load_reference_model
from beamwright.sections import ModelSettings


@pytest.mark.parametrize("attention", ["reference", "dense", "tree"])
def test_logits_equal_transformers(write_family, family, attention):
    folder, _ = write_family(family)
    found = check_parity(ModelSettings(model=str(folder), attention=attention))
    assert set(found) == {"prefill", "chunked", "decode"}
    assert max(found.values()) <= 1e-4


def test_parameters_and_kv_bytes_are_those_of_the_checkpoint(write_family, family):
    folder, model = write_family(family)
    found = inspect_model(ModelSettings(model=str(folder)))
    config = model.config
    head_dim = getattr(config, "head_dim", None) or 64 // 4
    kv_heads = getattr(config, "num_key_value_heads", None) or 4
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["kv_bytes_per_token"] == 2 * 3 * kv_heads * head_dim * 4
    assert (found["architecture"], found["supported"]) == (config.model_type, True)
    assert (found["context"], found["dtype"]) == (256, "float32")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weight", "it does not find model.norm.weight"),
        ("weight_scale", "it does not use model.norm.weight_scale"),
    ],
)
def test_what_transformers_reads_a_part_of_is_no_reference(llama_folder, name, said):
    """A tensor is missing, or one too many."""

    def change(tensors):
        if tensors.pop(f"model.norm.{name}", None) is None:
            tensors[f"model.norm.{name}"] = torch.ones(1)

    fakes.change_tensors(llama_folder, change)
    with pytest.raises(UnavailableError, match=rf"cannot read this checkpoint \({said}\)"):
        load_reference_model(llama_folder, torch.float32)


def test_what_transformers_wants_for_a_gguf_file_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("beamwright.models.load.find_spec", lambda name: None)
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnavailableError, match=r"\(it needs pip install accelerate gguf\)"):
        load_reference_model(file, torch.float32)
