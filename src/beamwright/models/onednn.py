"""Matrix products of float32 on a CPU by oneDNN, its weights prepacked where they stay.

`torch.nn.functional.linear` goes to MKL there. MKL packs the weights in each call, which for a few
dozen rows costs as much as the product, hardly uses a second core (docs/experiments.md), and takes
another kernel, with other last bits, for another number of rows: on some CPUs at 8, on others at
any. oneDNN's products were batch-invariant on every CPU tried (docs/architecture.md, "Sameness").
The operators are private to torch, so they are tried, and compared, before they are trusted.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from beamwright.models.decoder import DecoderWeights, Layer, Linear

_ROWS_HINT = 64
_TOLERANCE = 1e-3


class PackedLinear(Linear):
    """A projection whose weights are kept in oneDNN's order only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        super().__init__(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; rows have the same bits at any batch."""
        return _multiply(x, self.weight, self.bias)


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` for weights that do not stay; batch-invariant where oneDNN multiplies."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_multiply():
        return _multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@cache
def _can_multiply() -> bool:
    x, weight = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    try:
        found = _multiply(x, weight, None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(found, F.linear(x, weight), rtol=_TOLERANCE, atol=_TOLERANCE)


def prepack(linear: Linear) -> Linear:
    """The same projection, prepacked where torch can do it and gives the same results."""
    weight = linear.weight
    if type(linear) is not Linear or type(weight) is not torch.Tensor:
        return linear  # quantised
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return linear
    probe = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        packed = PackedLinear(weight, linear.bias)
        close = torch.allclose(packed(probe), linear(probe), rtol=_TOLERANCE, atol=_TOLERANCE)
    except (RuntimeError, AttributeError, NotImplementedError):
        return linear
    return packed if close else linear


def pack_weights(weights: DecoderWeights) -> DecoderWeights:
    """Replace every projection by its packed form, in place, one at a time."""
    parts: list[Layer | DecoderWeights] = [*weights.layers, weights]
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, Linear):
                setattr(part, name, prepack(value))
    return weights
