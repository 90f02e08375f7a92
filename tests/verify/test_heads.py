"""Heads whose files are not what the spec says: one line that names file and tensor."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from beamwright.errors import BeamwrightError, InputError
from beamwright.models.load import load_model
from beamwright.sections import ModelSettings
from beamwright.verify.prm import make_head
from beamwright.verify.spec import VerifierSpec


@pytest.fixture(scope="module")
def model(verifier_folder, tmp_path_factory):
    folder = shutil.copytree(verifier_folder, tmp_path_factory.mktemp("head") / "model")
    return load_model(str(folder), ModelSettings(), role="verifier")


def spec(**head):
    words = {"kind": "linear", "file": "head.safetensors", **head}
    softmax = words["kind"] in ("logit_pair", "two_layer")
    activation = "softmax" if softmax else "sigmoid"
    return VerifierSpec(name="x", read="step_end", head=words, activation=activation)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({}, "no tensor named layers.0.weight"),
        ({"weight": (1, 33)}, "layers.0.weight is .1, 33., but must be .outputs, 32"),
        ({"weight": (32,)}, "layers.0.weight is .32."),
        ({"weight": (0, 32)}, "layers.0.weight is .0, 32."),
        ({"weight": (2, 32)}, "gives 2 values"),
        ({"weight": (1, 32), "bias": (2,)}, "layers.0.bias is .2., but must be .1."),
    ],
)
def test_a_head_of_another_shape(model, sizes, complaint):
    tensors = {f"layers.0.{name}": torch.zeros(size) for name, size in sizes.items()}
    assert_refused(model, tensors, complaint)


def test_a_head_of_no_numbers(model):
    weight = torch.full((1, 32), float("nan"))
    assert_refused(model, {"layers.0.weight": weight}, "layers.0.weight holds NaN")


def assert_refused(model, tensors, complaint):
    save_file(tensors, model.folder / "head.safetensors")
    with pytest.raises(BeamwrightError, match=complaint) as caught:
        make_head(spec(), model)
    assert "head.safetensors" in str(caught.value)


@pytest.mark.parametrize("file", ["head.safetensors", "head.pt"])
@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"not tensors"])
def test_a_head_file_that_is_none(model, file, content):
    (model.folder / file).write_bytes(content)
    with pytest.raises(InputError, match=f"{file}: cannot be read"):
        make_head(spec(file=file), model)


@pytest.mark.parametrize("saved", [[1], range, {"weight": 1}])
def test_a_file_of_something_else_than_a_layer(model, saved):
    torch.save(saved, model.folder / "head.pt")
    with pytest.raises(InputError, match=r"head\.pt: (cannot be read|no tensor named layers\.0)"):
        make_head(spec(file="head.pt"), model)


@pytest.mark.parametrize("token", [-5, 10**6, "no such token", ""])
def test_a_token_that_is_none(model, token):
    with pytest.raises(InputError, match=r"token -?\d+ does not exist|must be one token"):
        make_head(spec(kind="logit_pair", good="+", bad=token), model)
