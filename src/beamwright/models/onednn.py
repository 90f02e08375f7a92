"""Matrix products on a CPU by oneDNN: float32, bfloat16, int8, prepacked where weights stay.

`torch.nn.functional.linear` goes to MKL there. MKL packs the weights in each call, which for a few
dozen rows costs as much as the product, hardly uses a second core (docs/experiments.md), and takes
another kernel, with other last bits, for another number of rows: on some CPUs at 8, on others at
any. oneDNN's products were batch-invariant on every CPU tried (docs/architecture.md, "Sameness"),
but for bfloat16 where a CPU multiplies tiles (AMX). Sums of int8 are exact, so they are anywhere.
The operators are private to torch, so they are tried, and compared, before they are trusted.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from beamwright.models.decoder import Linear

_ROWS_HINT = 64
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_BYTE_ZERO = 128
_BYTE_MOST = 127


class PackedLinear(Linear):
    """A projection whose weights are kept in oneDNN's order only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        super().__init__(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; rows have the same bits at any batch."""
        return _multiply(x, self.weight, self.bias)


class PackedInt8Linear(Linear):
    """A projection in int8 with a scale per row of weights, in oneDNN's order.

    A row of activations is rounded to 8 bits, too, with a scale of its own: largest to 127. The
    sums are exact integers, so a row's bits do not depend on the batch, nor on the CPU.
    weight: int8 [out, in]; scale: float32 [out].
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(torch.ops.onednn.qlinear_prepack(weight, None), bias)
        self.scale, self.columns = scale.contiguous(), weight.shape[1]
        self._zeros = torch.zeros(len(scale), dtype=torch.long)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product [rows, out] in x's dtype."""
        rounded, row_scale = to_bytes(x)
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, _BYTE_ZERO, self.weight, self.scale, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        product.mul_(row_scale)
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype)

    def values(self) -> torch.Tensor:
        """The weights [out, in] in float32, as they were rounded."""
        exact: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            torch.eye(self.columns, dtype=torch.uint8), 1.0, 0, self.weight, self.scale,
            self._zeros, None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return exact.t().contiguous()


def to_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] as uint8 around 128, and what a step is worth in each [rows, 1]."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    scale.div_(_BYTE_MOST)
    return (x / scale).round_().add_(_BYTE_ZERO).to(torch.uint8), scale


@cache
def multiplies_int8() -> bool:
    """Whether oneDNN's int8 products are here, and exact: some CPUs add pairs in 16 bits."""
    weight = torch.tensor([[127], [-128], [1]], dtype=torch.int8).expand(3, 256).contiguous()
    try:
        linear = PackedInt8Linear(weight, torch.ones(3), None)
        found = linear(torch.tensor([[127.0], [-127.0]]).expand(2, 256))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    exact = torch.tensor([[127.0, -128.0, 1.0]]) * 127 * 256
    return torch.equal(found, torch.cat([exact, -exact]))


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
    return _close(found, F.linear(x, weight))


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    most = _TOLERANCE[found.dtype]
    return torch.allclose(found, expected, rtol=most, atol=most)


def prepack(linear: Linear) -> Linear:
    """The same projection, prepacked where torch can do it and gives the same results."""
    weight = linear.weight
    if type(linear) is not Linear or type(weight) is not torch.Tensor:
        return linear  # quantised
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE:
        return linear
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(8, weight.shape[1], generator=generator).to(weight.dtype)
    try:
        packed = PackedLinear(weight, linear.bias)
        return packed if _close(packed(probe), linear(probe)) else linear
    except (RuntimeError, AttributeError, NotImplementedError):
        return linear
