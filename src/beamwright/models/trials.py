"""Decides, when weights are loaded, which projections use the kernels of `streaming` on a GPU.

Each shape of weights is tried once. The first goal is batch-invariance, the second is speed. This
module is imported only where the kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from beamwright.models.codes import UNIT, Codes
from beamwright.models.decoder import Linear
from beamwright.models.grouped import GroupedLinear, JoinedLinear
from beamwright.models.streaming import (
    FEW_ROWS,
    ROWS_OF_TILES,
    CodedLinear,
    FewRowsLinear,
    KernelLinear,
    ManyRowsProduct,
    count_parts,
    fills_gpu,
    gated_product,
    product,
    split_outputs,
)
from beamwright.plan.costs import QUANTISED_GEMM_ROWS

_ROWS = (*range(8, 257, 8), 320, 512, 768, 1024, 2048, 4096)
# Largest difference that rounding to 16 bits explains, as a share of the largest value.
_ROUNDED = 2**-6
# A weight is wide if its tiles fill a GPU this many times. One program computes each of its sums.
_WIDE = 2
_MOST_NUMBERS = 1 << 26  # maximum size of a trial's result, and of a drawn weight


class KernelChooser:
    """Converter of projections to the kernels of `streaming`, where these are needed or faster.

    The library's product is tried once per shape, with many numbers of rows. If that product is not
    batch-invariant, the kernel multiplies any number of rows. Otherwise the library stays in use,
    with one exception: for a weight with many outputs, the kernel multiplies up to `FEW_ROWS` rows
    if the results are bitwise equal.

    always: use the kernel for any number of rows, without trying the library.
    dtype: the dtype of activations, which a quantised projection does not store.
    """

    def __init__(self, *, always: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self._always, self._dtype = always, dtype
        self._known: dict[tuple[object, ...], type[Linear]] = {}
        self._coded: dict[tuple[object, ...], tuple[bool, ManyRowsProduct | None]] = {}

    def __call__(self, linear: Linear) -> Linear:
        weight, bias = linear.weight, linear.bias
        if isinstance(linear, JoinedLinear):
            return JoinedLinear([self(part) for part in linear.parts])
        if isinstance(linear, GroupedLinear):
            return self._convert_codes(linear)
        if type(linear) is not Linear or type(weight) is not Tensor or not _is_supported(weight):
            return linear
        key = weight.shape, weight.dtype, weight.device, bias is None
        if key not in self._known:
            try:
                self._known[key] = _choose(weight, bias, always=self._always)
            except (RuntimeError, TritonError):  # too little memory, or no kernel for this GPU
                self._known[key] = Linear
        return self._known[key](weight, bias)

    def _convert_codes(self, linear: GroupedLinear) -> Linear:
        """Convert a quantised projection, so that the kernel reads its codes.

        It is returned unchanged if the kernel does not support its format or gives wrong results.
        """
        codes = Codes.of(linear) if self._dtype.itemsize == 2 else None
        if codes is None:
            return linear
        key = linear.size, codes.bits, codes.group, codes.words.device, linear.bias is None
        if key not in self._coded:
            try:
                self._coded[key] = _try_codes(linear, codes, self._dtype, always=self._always)
            except (RuntimeError, TritonError):
                self._coded[key] = False, None
        is_right, many = self._coded[key]
        return CodedLinear(codes, linear.bias, many) if is_right else linear


def _is_supported(weight: Tensor) -> bool:
    """Return whether the kernel supports a plain weight.

    It needs 16 bits per number, contiguous rows, a multiple of 16 outputs, and a multiple of `UNIT`
    columns, so that rows start at multiples of 16 bytes.
    """
    outputs, columns = weight.shape
    whole = outputs % 16 == 0 and columns % UNIT == 0 and outputs > 0
    return whole and weight.dtype.itemsize == 2 and weight.is_contiguous()


def _choose(weight: Tensor, bias: Tensor | None, *, always: bool) -> type[Linear]:
    if not _is_correct(weight, weight, bias):
        return Linear
    if always:
        return KernelLinear
    x, like = draw_cancelling_input(weight)
    whole = F.linear(x, like, bias)
    if not is_invariant(lambda rows: F.linear(rows, like, bias), x, whole, _ROWS):
        return KernelLinear
    is_wide = fills_gpu(len(weight), _WIDE)
    counts = (8, FEW_ROWS)
    if is_wide and is_invariant(lambda rows: product(rows, like, bias), x, whole, counts):
        return FewRowsLinear
    return Linear


def _is_correct(kept: Tensor | Codes, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernels agree with the library up to rounding, for every tile size.

    kept: what the kernels read: `weight` itself, or the codes of which it is dequantised.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    size = ROWS_OF_TILES[-1], weight.shape[1]
    x = torch.randn(size, generator=generator, device=weight.device, dtype=weight.dtype)
    expected = F.linear(x, weight, bias)
    most = _ROUNDED * expected.abs().amax()
    if not all(
        bool((product(x[:count], kept, bias) - expected[:count]).abs().amax() <= most)
        for count in ROWS_OF_TILES
    ):
        return False
    gate, up = expected.chunk(2, dim=1)
    gated = F.silu(gate) * up
    most = 4 * _ROUNDED * gated.abs().amax()  # four values are rounded
    tried = [gated_product(x[:count], kept, bias, "silu") for count in ROWS_OF_TILES]
    results = [each for each in tried if each is not None]
    return all(bool((each - gated[: len(each)]).abs().amax() <= most) for each in results)


def _try_codes(
    linear: GroupedLinear, codes: Codes, dtype: torch.dtype, *, always: bool
) -> tuple[bool, ManyRowsProduct | None]:
    """Return whether the kernels' results for these codes are right, and a product for many rows.

    The product gives the same bits as the kernel for few rows; None if no available one does.
    """
    weight = codes.dequantise(dtype)
    rows = slice(0, min(len(codes), ROWS_OF_TILES[-1]))
    off = (weight[rows] - linear.dequantise(rows)).abs().amax()
    if not bool(off <= _ROUNDED * weight[rows].abs().amax()):
        return False, None
    if not _is_correct(codes, weight, linear.bias):
        return False, None
    del weight
    parts = count_parts(*linear.size)
    sizes = {last - first for first, last in split_outputs(*linear.size)}
    ways: tuple[ManyRowsProduct, ...] = (_by_kernel,) if always else (_by_library, _by_kernel)
    drawn = [(*_draw_cancelling_codes(linear, size, dtype), linear.bias) for size in sizes]
    agree = (way for way in ways if all(_agrees(way, *each, parts) for each in drawn))
    return True, next(agree, None)


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    return F.linear(x, weight, bias)


def _by_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    return product(x, weight, bias, parts=parts)


def _agrees(way: ManyRowsProduct, x: Tensor, codes: Codes, bias: Tensor | None, parts: int) -> bool:
    """Return whether the product `way` gives many rows the same bits as the kernel gives few rows.

    parts: number of parts of each sum.
    """
    weight, bias = codes.dequantise(x.dtype), None if bias is None else bias[: len(codes)]
    few = product(x[:QUANTISED_GEMM_ROWS], codes, bias, parts=parts)
    counts = [count for count in _ROWS if QUANTISED_GEMM_ROWS < count <= len(x)]
    return all(
        torch.equal(way(x[:count], weight, bias, parts)[: len(few)], few) for count in counts
    )


def _draw_cancelling_codes(
    linear: GroupedLinear, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Codes]:
    """Draw rows and a quantised weight whose products cancel, as `draw_cancelling_input` does.

    outputs: number of the weight's outputs. Columns and format are those of `linear`.
    """
    columns, device, bits = linear.columns, linear.weight.device, linear.bits
    like: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    order, half = torch.randperm(columns, **like), columns // 2
    x = torch.randn(min(_ROWS[-1], _MOST_NUMBERS // outputs), half, dtype=dtype, **like)
    drawn = torch.randint(1 << bits, (outputs, half), dtype=torch.uint8, **like)
    scale = torch.ones(outputs, linear.scales_and_lows.shape[1], device=device)
    grouped = torch.cat([drawn, drawn], 1)[:, order]
    codes = Codes.of(GroupedLinear.of(bits, grouped, scale, -(1 << bits - 1) * scale))
    assert codes is not None
    return torch.cat([x, -x], 1)[:, order], codes


def is_invariant(
    work: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor, counts: Iterable[int]
) -> bool:
    """Return whether a product is batch-invariant for each number of rows in `counts`.

    work: the product. whole: its result for all rows of `x`, which must be bitwise the same.
    """
    return all(torch.equal(work(x[:count]), whole[:count]) for count in counts if count <= len(x))


def draw_cancelling_input(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Draw rows, and a weight of the same size as `weight`, whose products are 0 up to rounding.

    So the products are rounding errors, and any other order of summation changes their bits. If the
    weight is larger than `_MOST_NUMBERS`, return random rows and the weight itself: its many
    results show a difference as well.
    """
    outputs, columns = weight.shape
    rows = min(_ROWS[-1], _MOST_NUMBERS // outputs)
    generator = torch.Generator(weight.device).manual_seed(0)
    like: dict[str, Any] = {"generator": generator, "device": weight.device}
    if weight.numel() > _MOST_NUMBERS:
        return torch.randn(rows, columns, dtype=weight.dtype, **like), weight
    order = torch.randperm(columns, **like)
    left, right = (
        torch.randn(count, columns // 2, dtype=weight.dtype, **like) for count in (rows, outputs)
    )
    return torch.cat([left, -left], 1)[:, order], torch.cat([right, right], 1)[:, order]
