"""Products on a card that read the weights once, and whose rows have the same bits at any batch.

A library takes another kernel for another number of rows. As long as that adds a row up column by
column, its bits stay; where it cuts the columns into parts (too few outputs to fill the card), they
go with the batch. Here the cut is a function of the weight's shape: whatever the rows, each part is
summed from its first column to its last and parts are added in order, by one program where tiles
are many, else by `add_parts`. Weights are the left side, so that a tile of 16 rows wastes nothing.
What was measured, and what lost: docs/log/2026-11-26-streamed-products.md. Loaded only where the
kernels run.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from beamwright.attention.kernels import is_interpreted
from beamwright.models.decoder import Linear
from beamwright.models.fused import launch, silu

UNIT = 128
"""Columns; parts are of whole units, and only such weights are streamed."""
FEW_ROWS = 64
"""Up to so many a wide product goes at the card's bandwidth; with more a library is faster."""
_UNITS = 132  # programs that fill a card
_LONG = 32  # units of columns
_WIDE = 2  # times as many tiles: there a whole sum fits a program
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
_MANY = ProductTile(128, 64, 64, 3, 4)
_WHOLE = ProductTile(128, 128, 64, 3, 8)


@triton.jit
def _sum_part(
    x, weight, place, first, last, columns, real,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums [OUTPUTS, ROWS] over columns first to last. place: of the weights' rows [OUTPUTS].

    WIDE: the interpreter would multiply bfloat16 as integers; as float32 the products are exact.
    """
    at = tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, last, COLUMNS, num_stages=STAGES):
        left = tl.load(weight + place[:, None] * columns + (start + at)[None, :])
        right = tl.load(
            x + rows[:, None] * columns + (start + at)[None, :], mask=real[:, None], other=0.0
        )
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit(do_not_specialize=["rows", "parts"])
def multiply_parts(
    x, weight, out, bias, rows, outputs, columns, parts,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, PARTIAL: tl.constexpr, ALONE: tl.constexpr, WIDE: tl.constexpr,
    LATE: tl.constexpr, EARLY: tl.constexpr,
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
            x, weight, place, 0, columns, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES, WIDE
        )
    elif PARTIAL:
        first, last = part * units // parts * UNIT, (part + 1) * units // parts * UNIT
        total = _sum_part(
            x, weight, place, first, last, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES, WIDE
        )
    else:
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for each in range(parts):
            first, last = each * units // parts * UNIT, (each + 1) * units // parts * UNIT
            total += _sum_part(
                x, weight, place, first, last, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES, WIDE
            )
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
    x, weight, out, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = silu(gate) * up of x @ weight[gate and up, outputs, columns]^T.

    All rows in a program's tile; half of its OUTPUTS are of the gate, half of what it lets through.
    Rounded where `multiply_parts` and `fused.gate_rows` do it.
    """
    HALF: tl.constexpr = OUTPUTS // 2
    first_output = tl.program_id(0) * HALF
    each = tl.arange(0, OUTPUTS)
    place = (first_output + each % HALF + each // HALF * outputs).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row < rows
    if EARLY:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    total = _sum_part(
        x, weight, place, 0, columns, columns, real, ROWS, OUTPUTS, COLUMNS, STAGES, WIDE
    )
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


def parts_of(outputs: int, columns: int) -> int:
    """Parts that a sum is cut into: a card is filled by one of each tile of 64 outputs.

    Into more where they would be long: a program alone has too little on its way.
    """
    tiles, units = -(-outputs // _TILES[0].outputs), columns // UNIT
    if tiles >= _UNITS:
        return 1
    return max(1, min(max(round(_UNITS / tiles), -(-units // _LONG)), units // 2))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, added: bool = True) -> Tensor:
    """x [rows, columns] @ weight [outputs, columns]^T + bias [outputs], in the dtype of x.

    added: else parts that are not added up here may stay apart, see `decoder.Linear.unadded`.
    """
    (rows, columns), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    parts = parts_of(outputs, columns)
    tile = next((each for each in _TILES if rows <= each.rows), _WHOLE)
    partial = parts > 1
    if tile is _WHOLE and partial:
        partial = -(-rows // tile.rows) * -(-outputs // tile.outputs) < _IN_TURN
        tile = _MANY if partial else tile
    sums = x.new_empty(parts, rows, outputs, dtype=torch.float32) if partial else out
    programs = -(-rows // tile.rows) * -(-outputs // tile.outputs) * (parts if partial else 1)
    tensors = x.contiguous(), weight, sums, None if partial else bias
    numbers = rows, outputs, columns, parts
    sizes = *tile[:4], UNIT, partial, parts == 1, is_interpreted(), tile.late
    launch(multiply_parts, (programs, 1, 1), tensors, numbers, sizes, tile.warps, tile.stages)
    if partial and not added and bias is None:
        return sums
    if partial:
        grid = -(-out.numel() // _ADDED), 1, 1
        numbers = rows, outputs, parts
        launch(add_parts, grid, (out, sums, bias), numbers, (_ADDED, _AT_ONCE), _ADDED_WARPS)
    return out


def gated_product(x: Tensor, linear: Linear, kind: str) -> Tensor | None:
    """silu(gate) * up [rows, outputs / 2] of few rows; None: of others, and of other products."""
    (rows, columns), outputs, weight = x.shape, len(linear.weight) // 2, linear.weight
    tile = next((each for each in _TILES if rows <= each.rows), None)
    if kind != "silu" or tile is None or linear.bias is not None or outputs % tile.outputs:
        return None
    if parts_of(2 * outputs, columns) > 1:
        return None
    out = x.new_empty(rows, outputs)
    grid = 2 * outputs // tile.outputs, 1, 1
    sizes = *tile[:4], is_interpreted(), tile.late
    tensors, numbers = (x.contiguous(), weight, out), (rows, outputs, columns)
    launch(multiply_gated, grid, tensors, numbers, sizes, tile.warps, tile.stages)
    return out


class StreamedLinear(Linear):
    """A projection that the kernel multiplies, however many rows there are."""

    takes_one_row = True
    is_fixed = True

    def __call__(self, x: Tensor) -> Tensor:
        """The product [rows, outputs]."""
        return product(x, self.weight, self.bias)

    def unadded(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, added=False)

    def gated(self, x: Tensor, kind: str) -> Tensor | None:
        return gated_product(x, self, kind)


class FewStreamedLinear(Linear):
    """A projection that the kernel multiplies while rows are few: the library has the same bits."""

    takes_one_row = True

    def __call__(self, x: Tensor) -> Tensor:
        """The product [rows, outputs]."""
        by = product if len(x) <= FEW_ROWS else F.linear
        return by(x, self.weight, self.bias)

    def gated(self, x: Tensor, kind: str) -> Tensor | None:
        return gated_product(x, self, kind)


# --- which products --------------------------------------------------------------------------

_ROWS = (*range(8, 257, 8), 320, 512, 768, 1024, 2048, 4096)
_ROUNDED = 2**-6  # of the largest number, what roundings to 16 bits may differ by
_MOST_NUMBERS = 1 << 26  # of a result, and of a weight that is drawn, when it is tried


class Streaming:
    """Streams projections where that is needed for a row's bits, or faster.

    The library's product is tried once for each shape with many numbers of rows. Where it gives a
    row the same bits with all of them it stays; if it is wide, and the kernel has these bits, too,
    few rows stream. always: no library chooses a kernel for any number of rows.
    """

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._known: dict[tuple[object, ...], type[Linear]] = {}

    def __call__(self, linear: Linear) -> Linear:
        weight, bias = linear.weight, linear.bias
        if type(linear) is not Linear or type(weight) is not Tensor or not _streams(weight):
            return linear
        key = weight.shape, weight.dtype, weight.device, bias is None
        if key not in self._known:
            try:
                self._known[key] = _choose(weight, bias, always=self._always)
            except (RuntimeError, TritonError):  # no memory to try it, or no kernel on this card
                self._known[key] = Linear
        return self._known[key](weight, bias)


def _streams(weight: Tensor) -> bool:
    """Whether the kernel takes it: in 16 bits, in rows that start at multiples of 16 bytes."""
    outputs, columns = weight.shape
    whole = outputs % 16 == 0 and columns % UNIT == 0 and outputs > 0
    return whole and weight.dtype.itemsize == 2 and weight.is_contiguous()


def _choose(weight: Tensor, bias: Tensor | None, *, always: bool) -> type[Linear]:
    if not _is_right(weight, bias):
        return Linear
    if always:
        return StreamedLinear
    x, like = cancelling(weight)
    whole = F.linear(x, like, bias)
    if not is_invariant(lambda rows: F.linear(rows, like, bias), x, whole, _ROWS):
        return StreamedLinear
    is_wide = len(weight) >= _WIDE * _UNITS * _TILES[0].outputs
    counts = (8, FEW_ROWS)
    if is_wide and is_invariant(lambda rows: product(rows, like, bias), x, whole, counts):
        return FewStreamedLinear
    return Linear


def _is_right(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels' products are the library's but for roundings, in every tile."""
    generator = torch.Generator(weight.device).manual_seed(0)
    size = _WHOLE.rows, weight.shape[1]
    x = torch.randn(size, generator=generator, device=weight.device, dtype=weight.dtype)
    expected = F.linear(x, weight, bias)
    most = _ROUNDED * expected.abs().amax()
    counts = (*(tile.rows for tile in _TILES), _WHOLE.rows)
    if not all(
        bool((product(x[:count], weight, bias) - expected[:count]).abs().amax() <= most)
        for count in counts
    ):
        return False
    gate, up = expected.chunk(2, dim=1)
    gated = F.silu(gate) * up
    most = 4 * _ROUNDED * gated.abs().amax()  # four roundings
    tried = [gated_product(x[: tile.rows], Linear(weight, bias), "silu") for tile in _TILES]
    found = [each for each in tried if each is not None]
    return all(bool((each - gated[: len(each)]).abs().amax() <= most) for each in found)


def is_invariant(
    work: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor, counts: Iterable[int]
) -> bool:
    """Whether the first rows of x give the bits in `whole` at each of these numbers of rows."""
    return all(torch.equal(work(x[:count]), whole[:count]) for count in counts if count <= len(x))


def cancelling(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, and weights like these, whose products are nought but for roundings: those tell.

    Of weights that are too large to be drawn the products are as they come; they are many.
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
