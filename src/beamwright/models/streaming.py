"""Batch-invariant matrix products on a GPU, which read each weight once (Triton kernels).

A library such as cuBLAS chooses its kernel by the number of rows. Where the outputs are too few to
fill the GPU, it splits each sum over columns into parts (split-K). The split depends on the number
of rows, and with it the last bits of the result.

Here the split depends only on the weight's shape. Each part is summed from its first column to its
last, and parts are added in order. One program does both if there are many tiles; otherwise
`add_parts` adds the parts. Weights are the left operand, so a tile of 16 rows wastes no work.
Measurements and rejected variants: docs/log/2026-11.md#streamed-products.

This module is imported only where the kernels run. It does not postpone annotations, because Triton
reads `tl.constexpr` from them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from beamwright.attention.kernels import is_interpreted
from beamwright.models.codes import UNIT, Codes, sum_codes
from beamwright.models.decoder import Linear
from beamwright.models.layer_kernels import launch, silu
from beamwright.plan.costs import DEQUANTISED_VALUES, QUANTISED_GEMM_ROWS

# Maximum number of rows for which the kernel is as fast as a library, if outputs are many.
FEW_ROWS = 64
_UNITS = 132  # programs that fill a GPU
_LONG = 32  # longest part of a sum, in units of columns
_ADDED, _ADDED_WARPS = 1024, 4  # outputs and warps of a program of `add_parts`
_AT_ONCE = 8  # parts that `add_parts` loads at once
# With this many tiles or more, one program computes all parts of a tile and adds them. Partial sums
# in memory would cost more time than the additional programs save.
_IN_TURN = 64


class ProductTile(NamedTuple):
    """Tile size and launch settings of a program of `multiply_parts`.

    rows, outputs: the size of the result's tile. columns: columns that are loaded at a time.
    stages, warps: as in Triton.
    late: let the next kernel begin after the sums, not at the start. By measurement this is faster
        only with 64 rows.
    """

    rows: int
    outputs: int
    columns: int
    stages: int
    warps: int
    late: bool = False


_TILES = (
    ProductTile(16, 64, 128, 3, 4),
    ProductTile(32, 64, 128, 3, 4),
    ProductTile(64, 64, 64, 4, 4, late=True),
)
_CODED = tuple(tile._replace(stages=stages) for tile, stages in zip(_TILES, (5, 4, 3), strict=True))
_MANY = ProductTile(128, 64, 64, 3, 4)
_WHOLE = ProductTile(128, 128, 64, 3, 8)
# Maximum number of rows of each tile.
ROWS_OF_TILES = (*(tile.rows for tile in _TILES), _WHOLE.rows)


@triton.jit
def _sum_part(
    x, weight, ends, place, first, last, columns, real,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the products [OUTPUTS, ROWS], summed over the columns `first` to `last` - 1.

    place: the weight's rows [OUTPUTS]. real: [ROWS], False for padding.
    BITS: the bits of a code in a quantised weight; 0 for a plain weight.
    WIDE: multiply in float32, where the products are exact. The interpreter needs it, because it
    would multiply bfloat16 numbers as integers.
    """
    if BITS > 0:
        total = sum_codes(
            x, weight, ends, place, first, last, columns, real, ROWS, OUTPUTS, STAGES, BITS, GROUP,
            WIDE,
        )  # fmt: skip
    else:
        at = tl.arange(0, COLUMNS)
        rows = tl.arange(0, ROWS)
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in tl.range(first, last, COLUMNS, num_stages=STAGES):
            left = tl.load(weight + place[:, None] * columns + (start + at)[None, :])
            right = x + rows[:, None] * columns + (start + at)[None, :]
            right = tl.load(right, mask=real[:, None], other=0.0)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit(do_not_specialize=["rows", "parts"])
def multiply_parts(
    x, weight, ends, out, bias, rows, outputs, columns, parts,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr,
    UNIT: tl.constexpr, PARTIAL: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute out[rows, outputs] = x[rows, columns] @ weight[outputs, columns]^T + bias.

    Each program computes one tile. Programs with the same tile of weights have adjacent numbers, so
    the tile is read from memory once.
    PARTIAL: each program computes one part of a tile, without bias, and writes it to
    out[parts, rows, outputs] in float32.
    ALONE: the sum has one part.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    rest = tl.program_id(0) // row_tiles
    tile, part = rest, 0
    if PARTIAL:
        tile, part = rest // parts, rest % parts
    first_output = tile * OUTPUTS
    place = tl.minimum(tl.arange(0, OUTPUTS), outputs - 1 - first_output)
    if BITS > 0:
        place += first_output
    else:
        weight += first_output.to(tl.int64) * columns
    x += (row_tile * ROWS).to(tl.int64) * columns
    row = row_tile * ROWS + tl.arange(0, ROWS)
    real = row < rows
    units = columns // UNIT
    if EARLY:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    if ALONE:
        total = _sum_part(
            x, weight, ends, place, 0, columns, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES,
            BITS, GROUP, WIDE,
        )  # fmt: skip
    elif PARTIAL:
        first, last = part * units // parts * UNIT, (part + 1) * units // parts * UNIT
        total = _sum_part(
            x, weight, ends, place, first, last, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES,
            BITS, GROUP, WIDE,
        )  # fmt: skip
    else:
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for each in range(parts):
            first, last = each * units // parts * UNIT, (each + 1) * units // parts * UNIT
            total += _sum_part(
                x, weight, ends, place, first, last, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES,
                BITS, GROUP, WIDE,
            )  # fmt: skip
    if EARLY and LATE:
        gdc_launch_dependents()
    output = first_output + tl.arange(0, OUTPUTS)
    inside = output < outputs
    result = tl.trans(total)
    if bias is not None:
        result += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = (part * rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_gated(
    x, weight, ends, out, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute out[rows, outputs] = silu(gate) * up.

    gate and up are the halves of x @ weight[2 * outputs, columns]^T. A program's tile has all rows.
    Half of its OUTPUTS belong to gate and half to up. Results are rounded where `multiply_parts`
    and `layer_kernels.gate_rows` round them, so they are bitwise equal to those.
    """
    HALF: tl.constexpr = OUTPUTS // 2
    first_output = tl.program_id(0) * HALF
    each = tl.arange(0, OUTPUTS)
    place = first_output + each % HALF + each // HALF * outputs
    if BITS == 0:
        place = place.to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row < rows
    if EARLY:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    total = _sum_part(
        x, weight, ends, place, 0, columns, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES,
        BITS, GROUP, WIDE,
    )  # fmt: skip
    if EARLY and LATE:
        gdc_launch_dependents()
    both = tl.reshape(total.to(out.dtype.element_ty), (2, HALF, ROWS))
    gate, up = tl.split(tl.permute(both, (1, 2, 0)))
    result = silu(gate.to(tl.float32)).to(out.dtype.element_ty).to(tl.float32) * up.to(tl.float32)
    at = row[:, None] * outputs + (first_output + tl.arange(0, HALF))[None, :]
    tl.store(out + at, tl.trans(result.to(out.dtype.element_ty)), mask=real[:, None])


@triton.jit(do_not_specialize=["rows", "parts"])
def add_parts(
    out, partial, bias, rows, outputs, parts,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add partial[parts, rows, outputs] in order, plus the bias [outputs], to out[rows, outputs].

    out is overwritten.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    size = rows.to(tl.int64) * outputs
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            held = inside & (start + step < parts)
            total += tl.load(partial + (start + step) * size + at, mask=held, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def fills_gpu(outputs: int, times: int = 1) -> bool:
    """Return whether a weight has enough tiles of 64 outputs to fill a GPU `times` times."""
    return outputs >= times * _UNITS * _TILES[0].outputs


def count_parts(outputs: int, columns: int) -> int:
    """Return the number of parts into which each sum over `columns` is split.

    A weight with enough tiles of 64 outputs to fill a GPU has one part. For others, one program
    computes one part of a tile, and there are as many parts as fill the GPU. Parts of more than 32
    units of columns are split further, because one program alone has too few loads in flight.
    """
    tiles, units = -(-outputs // _TILES[0].outputs), columns // UNIT
    if tiles >= _UNITS:
        return 1
    return max(1, min(max(round(_UNITS / tiles), -(-units // _LONG)), units // 2))


def product(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    *,
    added: bool = True,
    parts: int | None = None,
) -> Tensor:
    """Return x [rows, columns] @ weight [outputs, columns]^T + bias [outputs], in the dtype of x.

    added: False to allow float32 partial sums as the result, see `decoder.Linear.partial_sums`.
    parts: the number of parts of each sum; None: what `count_parts` returns.
    """
    (rows, columns), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    parts = count_parts(outputs, columns) if parts is None else parts
    kept, tile = _operands(weight, rows)
    partial = parts > 1
    if isinstance(weight, Codes):
        partial = partial and rows <= QUANTISED_GEMM_ROWS
    elif tile is _WHOLE and partial:
        partial = -(-rows // tile.rows) * -(-outputs // tile.outputs) < _IN_TURN
        tile = _MANY if partial else tile
    sums = x.new_empty(parts, rows, outputs, dtype=torch.float32) if partial else out
    programs = -(-rows // tile.rows) * -(-outputs // tile.outputs) * (parts if partial else 1)
    tensors = x.contiguous(), *kept, sums, None if partial else bias
    numbers = rows, outputs, columns, parts
    sizes = *_sizes(weight, tile), UNIT, partial, parts == 1
    launch(multiply_parts, (programs, 1, 1), tensors, numbers, sizes, tile.warps, tile.stages)
    if partial and not added and bias is None:
        return sums
    if partial:
        grid = -(-out.numel() // _ADDED), 1, 1
        numbers = rows, outputs, parts
        launch(add_parts, grid, (out, sums, bias), numbers, (_ADDED, _AT_ONCE), _ADDED_WARPS)
    return out


def _operands(
    weight: Tensor | Codes, rows: int
) -> tuple[tuple[Tensor, Tensor | None], ProductTile]:
    """Return the two tensors that kernels read for a weight, and the tile for `rows` rows.

    The tensors are the plain weight and None, or a quantised weight's codes and scales.
    """
    if isinstance(weight, Codes):
        tile = next((each for each in _CODED if rows <= each.rows), _CODED[-1])
        return (weight.words, weight.scales_and_lows), tile
    return (weight, None), next((each for each in _TILES if rows <= each.rows), _WHOLE)


def _sizes(weight: Tensor | Codes, tile: ProductTile) -> tuple[int, ...]:
    """Return the compile-time parameters of the product kernels, from ROWS to LATE."""
    how = (weight.bits, weight.group) if isinstance(weight, Codes) else (0, 0)
    return *tile[:4], *how, is_interpreted(), tile.late


def gated_product(
    x: Tensor, weight: Tensor | Codes, bias: Tensor | None, kind: str
) -> Tensor | None:
    """Return silu(gate) * up [rows, outputs / 2], where gate and up are halves of a product.

    None: the kernel cannot compute this. It needs at most 64 rows, no bias, kind "silu", a number
    of outputs that fits its tile, and sums of one part.
    """
    (rows, columns), outputs = x.shape, len(weight) // 2
    kept, tile = _operands(weight, rows)
    if kind != "silu" or rows > _TILES[-1].rows or bias is not None or outputs % tile.outputs:
        return None
    if count_parts(2 * outputs, columns) > 1:
        return None
    out = x.new_empty(rows, outputs)
    grid = 2 * outputs // tile.outputs, 1, 1
    tensors, numbers = (x.contiguous(), *kept, out), (rows, outputs, columns)
    launch(multiply_gated, grid, tensors, numbers, _sizes(weight, tile), tile.warps, tile.stages)
    return out


# A product for many rows. Arguments: x, weight [outputs, columns], bias, number of parts of a sum.
ManyRowsProduct = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]


class KernelLinear(Linear):
    """A projection that the kernel `multiply_parts` multiplies, for any number of rows."""

    is_exact_for_one_row = True
    is_batch_invariant = True

    @property
    def operand(self) -> Tensor | Codes:
        """The weight as the kernel reads it."""
        return self.weight

    def uses_kernel(self, x: Tensor) -> bool:
        """Return whether the kernel multiplies x, or x has too many rows: see `multiply_many`."""
        return True

    def multiply_many(self, x: Tensor) -> Tensor:
        """Multiply many rows, without the kernel. Results are bitwise equal to the kernel's."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [rows, outputs]."""
        return product(x, self.operand, self.bias) if self.uses_kernel(x) else self.multiply_many(x)

    def partial_sums(self, x: Tensor) -> Tensor:
        return (
            product(x, self.operand, self.bias, added=False)
            if self.uses_kernel(x)
            else self.multiply_many(x)
        )

    def gated(self, x: Tensor, kind: str) -> Tensor | None:
        return gated_product(x, self.operand, self.bias, kind)


class FewRowsLinear(KernelLinear):
    """A projection that our kernel computes for at most `FEW_ROWS` rows, and the library for more.

    `trials.KernelChooser` uses this class only for weights whose rows it found bitwise equal in
    both. That was a test on some numbers of rows, so the product does not count as invariant.
    """

    is_batch_invariant = False

    def uses_kernel(self, x: Tensor) -> bool:
        return len(x) <= FEW_ROWS

    def multiply_many(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class CodedLinear(KernelLinear):
    """A quantised projection, whose codes the kernel reads directly for few rows.

    by: a product whose results are bitwise equal to the kernel's. For more rows than
        `QUANTISED_GEMM_ROWS` the weight is dequantised piece by piece, and `by` multiplies x with
        each piece. None: the kernel multiplies any number of rows, and reads the codes again for
        each tile of rows.
    """

    def __init__(self, codes: Codes, bias: Tensor | None, by: ManyRowsProduct | None) -> None:
        super().__init__(codes.words, bias)
        self.codes, self.by = codes, by

    @property
    def operand(self) -> Codes:
        return self.codes

    @property
    def stored(self) -> list[Tensor]:
        return [self.codes.words, self.codes.scales_and_lows]

    def place_stored(self, tensors: Sequence[Tensor]) -> None:
        words, scales_and_lows = tensors
        self.codes = replace(self.codes, words=words, scales_and_lows=scales_and_lows)
        self.weight = words

    def uses_kernel(self, x: Tensor) -> bool:
        return len(x) <= QUANTISED_GEMM_ROWS or self.by is None

    def multiply_many(self, x: Tensor) -> Tensor:
        outputs, columns = len(self.codes), x.shape[1]
        parts, products = count_parts(outputs, columns), []
        for first, last in split_outputs(outputs, columns):
            weight = self.codes.rows(first, last).dequantise(x.dtype)
            bias = None if self.bias is None else self.bias[first:last]
            products.append(self.by(x, weight, bias, parts))
        return products[0] if len(products) == 1 else torch.cat(products, 1)


def split_outputs(outputs: int, columns: int) -> list[tuple[int, int]]:
    """Split a weight's outputs into pieces that are dequantised one at a time.

    Return (first, end) of each piece. All pieces except the last have the same size.
    """
    count = -(-outputs * columns // DEQUANTISED_VALUES)
    size = -(-outputs // count // UNIT) * UNIT
    return [(at, min(at + size, outputs)) for at in range(0, outputs, size)]
