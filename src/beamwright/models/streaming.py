"""Products on a card that read the weights once, and whose rows have the same bits at any batch.

A library takes another kernel for another number of rows. As long as that adds a row up column by
column, its bits stay; where it cuts the columns into parts (too few outputs to fill the card), they
go with the batch. Here the cut is a function of the weight's shape: whatever the rows, each part is
summed from its first column to its last and parts are added in order, by one program where tiles
are many, else by `add_parts`. Weights are the left side, so that a tile of 16 rows wastes nothing.
What was measured, and what lost: docs/log/2026-11.md#streamed-products. Loaded only where the
kernels run.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

from collections.abc import Callable
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
from beamwright.models.fused import launch, silu
from beamwright.plan.costs import CODED_ROWS, CODED_VALUES

FEW_ROWS = 64
"""Up to so many a wide product goes at the card's bandwidth; with more a library is faster."""
_UNITS = 132  # programs that fill a card
_LONG = 32  # units of columns
_ADDED, _ADDED_WARPS = 1024, 4  # numbers that a program of `add_parts` makes
_AT_ONCE = 8  # parts whose numbers are on their way together
_IN_TURN = 64  # tiles of many rows that are worth no partial sums in memory


class ProductTile(NamedTuple):
    """What a program multiplies at once, and how; see `multiply_parts`.

    late: what follows may begin when the sums are done, not at once: measured, at 64 rows alone.
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
ROWS_OF_TILES = (*(tile.rows for tile in _TILES), _WHOLE.rows)
"""Rows that a program of each tile takes at most."""


@triton.jit
def _sum_part(
    x, weight, ends, place, first, last, columns, real,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums [OUTPUTS, ROWS] over columns first to last. place: of the weights' rows [OUTPUTS].

    BITS: of the weights, if they are codes. WIDE: the interpreter would multiply bfloat16 as
    integers; as float32 the products are exact.
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
    """out[rows, outputs] = x[rows, columns] @ weight[outputs, columns]^T + bias; a tile a program.

    PARTIAL: a part a program, without bias, to out[parts, rows, outputs] in float32.
    ALONE: there is one part. Programs of a tile of weights are neighbours: it is read once.
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
    found = tl.trans(total)
    if bias is not None:
        found += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = (part * rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_gated(
    x, weight, ends, out, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = silu(gate) * up of x @ weight[gate and up, outputs, columns]^T.

    All rows in a program's tile; half of its OUTPUTS are of the gate, half of what it lets through.
    Rounded where `multiply_parts` and `fused.gate_rows` do it.
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
    found = silu(gate.to(tl.float32)).to(out.dtype.element_ty).to(tl.float32) * up.to(tl.float32)
    at = row[:, None] * outputs + (first_output + tl.arange(0, HALF))[None, :]
    tl.store(out + at, tl.trans(found.to(out.dtype.element_ty)), mask=real[:, None])


@triton.jit(do_not_specialize=["rows", "parts"])
def add_parts(
    out, partial, bias, rows, outputs, parts,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = partial[parts, rows, outputs] added in order, and the bias [outputs]."""
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


def fills(outputs: int, times: int = 1) -> bool:
    """Whether a card is filled so many times by a program of each tile of a weight."""
    return outputs >= times * _UNITS * _TILES[0].outputs


def parts_of(outputs: int, columns: int) -> int:
    """Parts that a sum is cut into: a card is filled by one of each tile of 64 outputs.

    Into more where they would be long: a program alone has too little on its way.
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
    """x [rows, columns] @ weight [outputs, columns]^T + bias [outputs], in the dtype of x.

    added: else parts that are not added up here may stay apart, see `decoder.Linear.unadded`.
    parts: of each sum; None: as the shape of the weight has it, see `parts_of`.
    """
    (rows, columns), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    parts = parts_of(outputs, columns) if parts is None else parts
    kept, tile = _kept(weight, rows)
    partial = parts > 1
    if isinstance(weight, Codes):
        partial = partial and rows <= CODED_ROWS
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


def _kept(weight: Tensor | Codes, rows: int) -> tuple[tuple[Tensor, Tensor | None], ProductTile]:
    """What kernels read of a weight, and the tile for so many rows."""
    if isinstance(weight, Codes):
        tile = next((each for each in _CODED if rows <= each.rows), _CODED[-1])
        return (weight.words, weight.ends), tile
    return (weight, None), next((each for each in _TILES if rows <= each.rows), _WHOLE)


def _sizes(weight: Tensor | Codes, tile: ProductTile) -> tuple[int, ...]:
    """What the kernels that multiply are compiled for."""
    how = (weight.bits, weight.group) if isinstance(weight, Codes) else (0, 0)
    return *tile[:4], *how, is_interpreted(), tile.late


def gated_product(
    x: Tensor, weight: Tensor | Codes, bias: Tensor | None, kind: str
) -> Tensor | None:
    """silu(gate) * up [rows, outputs / 2] of few rows; None: of others, and of other products."""
    (rows, columns), outputs = x.shape, len(weight) // 2
    kept, tile = _kept(weight, rows)
    if kind != "silu" or rows > _TILES[-1].rows or bias is not None or outputs % tile.outputs:
        return None
    if parts_of(2 * outputs, columns) > 1:
        return None
    out = x.new_empty(rows, outputs)
    grid = 2 * outputs // tile.outputs, 1, 1
    tensors, numbers = (x.contiguous(), *kept, out), (rows, outputs, columns)
    launch(multiply_gated, grid, tensors, numbers, _sizes(weight, tile), tile.warps, tile.stages)
    return out


Many = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""A product of many rows, from a plain weight [outputs, columns], a bias, and parts of its sums."""


class StreamedLinear(Linear):
    """A projection that the kernel multiplies, however many rows there are."""

    takes_one_row = True
    is_fixed = True

    @property
    def kept(self) -> Tensor | Codes:
        """What the kernel reads."""
        return self.weight

    def streams(self, x: Tensor) -> bool:
        """Whether the kernel multiplies so many rows; others are `many`."""
        return True

    def many(self, x: Tensor) -> Tensor:
        """The product of rows that do not stream, with the bits that they would have."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product [rows, outputs]."""
        return product(x, self.kept, self.bias) if self.streams(x) else self.many(x)

    def unadded(self, x: Tensor) -> Tensor:
        return product(x, self.kept, self.bias, added=False) if self.streams(x) else self.many(x)

    def gated(self, x: Tensor, kind: str) -> Tensor | None:
        return gated_product(x, self.kept, self.bias, kind)


class FewStreamedLinear(StreamedLinear):
    """A projection that the kernel multiplies while rows are few: the library has the same bits."""

    is_fixed = False

    def streams(self, x: Tensor) -> bool:
        return len(x) <= FEW_ROWS

    def many(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class CodedLinear(StreamedLinear):
    """A projection in codes, which the kernel reads as they are while rows are few.

    For many rows a piece of it at a time is turned back, and `by` has the bits of the kernel; if
    none has, the kernel reads codes for each tile of them.
    """

    def __init__(self, codes: Codes, bias: Tensor | None, by: Many | None) -> None:
        super().__init__(codes.words, bias)
        self.codes, self.by = codes, by

    @property
    def kept(self) -> Codes:
        return self.codes

    def streams(self, x: Tensor) -> bool:
        return len(x) <= CODED_ROWS or self.by is None

    def many(self, x: Tensor) -> Tensor:
        outputs, columns = len(self.codes), x.shape[1]
        parts, found = parts_of(outputs, columns), []
        for first, last in pieces(outputs, columns):
            weight = self.codes.rows(first, last).values(x.dtype)
            bias = None if self.bias is None else self.bias[first:last]
            found.append(self.by(x, weight, bias, parts))
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def pieces(outputs: int, columns: int) -> list[tuple[int, int]]:
    """First and last outputs of what is turned back at a time; all but the last are equal."""
    count = -(-outputs * columns // CODED_VALUES)
    size = -(-outputs // count // UNIT) * UNIT
    return [(at, min(at + size, outputs)) for at in range(0, outputs, size)]
