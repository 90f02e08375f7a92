import pytest
import torch

from beamwright.models.decoder import Linear
from beamwright.models.linear import PackedLinear, prepack


def draw(seed, *size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [None, draw(2, 24)], ids=["plain", "bias"])
@torch.inference_mode()
def test_a_packed_projection_is_the_same_projection(bias):
    linear = Linear(draw(0, 24, 40), bias)
    packed = prepack(linear)
    x = draw(1, 33, 40)
    assert isinstance(packed, PackedLinear)
    assert (packed(x) - linear(x)).abs().max() < 1e-5


@torch.inference_mode()
def test_rows_have_the_same_bits_at_any_batch():
    packed = prepack(Linear(draw(0, 384, 128)))
    x = draw(1, 256, 128)
    whole = packed(x)
    for rows in (8, 16, 24, 64, 136):
        assert torch.equal(packed(x[:rows]), whole[:rows])


@torch.inference_mode()
def test_bfloat16_is_packed_with_the_same_results():
    linear = Linear(draw(0, 384, 896).bfloat16(), draw(1, 384).bfloat16())
    packed, x = prepack(linear), draw(2, 64, 896).bfloat16()
    assert packed(x).dtype == torch.bfloat16
    assert (packed(x) - linear(x)).abs().max() < 0.02 * linear(x).abs().max()


def test_other_precisions_stay_as_they_are():
    linear = Linear(draw(0, 24, 40).double())
    assert prepack(linear) is linear


def test_an_operator_that_torch_lacks_or_that_errs_is_not_used(monkeypatch):
    linear = Linear(draw(0, 24, 40))
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: x[:, :24] * 0)
    assert prepack(linear) is linear

    def refuse(self, weight, bias):
        raise NotImplementedError

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    assert prepack(linear) is linear
