"""Weights in 4 or 8 bits on a card: their layout in memory, and how kernels turn them back.

Sixteen outputs and as many columns as fit a word of each make a tile of 1 KiB in one piece: word t
of an output has the codes of columns t, t + 16, t + 32, ..., the first of them in its lowest bits.
So a copy is of 16 bytes at a time, and a thread finds in the words that it reads, code by code, the
numbers that it multiplies in sixteen columns after the other: threads exchange nothing. A code
times its scale plus its low is rounded once, to the dtype of the activations: a product has the
bits of one with these numbers. Loaded only where the kernels run.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from beamwright.attention.kernels import is_interpreted
from beamwright.models.grouped import GroupedLinear

UNIT = 128
"""Columns; parts of a sum are of whole units."""
_SIDE = 16  # outputs of a tile, and columns that a code of each of its words is of
_ROW = 1 << 30  # columns of a group that has a whole row: one kernel for all widths
_BLOCK_VALUES = 1 << 24  # laid out at a time


@dataclass(frozen=True)
class Codes:
    """A weight [outputs, columns] in codes.

    words: int32 [outputs / 16, columns * bits / 512, 16 outputs, 16]. ends: a group's scale and low
    of each output, int32 [outputs / 16, groups, words, 16 outputs]: of 4 bits float16 both in a
    word, the scale first; of 8 bits a float32 each. group: columns, or more where a row is one.
    """

    words: Tensor
    ends: Tensor
    bits: int
    group: int

    def __len__(self) -> int:
        """Outputs."""
        return self.words.shape[0] * _SIDE

    @classmethod
    def of(cls, linear: GroupedLinear) -> "Codes | None":
        """A projection's; None where tiles, or groups, are not whole."""
        (outputs, columns), bits, ends = linear.size, linear.bits, linear.ends
        group = linear.group if ends.shape[1] > 1 else _ROW
        is_whole = outputs > 0 and outputs % _SIDE == 0 and columns % UNIT == 0
        fits = group % _SIDE == 0 and (UNIT % group == 0 or group % UNIT == 0)
        if not is_whole or not fits or ends.shape[1] * linear.group != columns:
            return None
        count = max(1, _BLOCK_VALUES // columns // _SIDE) * _SIDE
        blocks = [slice(at, min(outputs, at + count)) for at in range(0, outputs, count)]
        words = torch.cat([_words(linear.codes(rows), bits) for rows in blocks])
        if bits < 8:
            ends = ends.contiguous().view(torch.int32)
        tiles = ends.view(torch.int32).unflatten(0, (-1, _SIDE)).permute(0, 2, 3, 1)
        return cls(words, tiles.contiguous(), bits, group)

    def rows(self, first: int, last: int) -> "Codes":
        """Those outputs; both are multiples of 16."""
        tiles = slice(first // _SIDE, last // _SIDE)
        return Codes(self.words[tiles], self.ends[tiles], self.bits, self.group)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What is multiplied [outputs, columns]."""
        columns = self.words.shape[1] * _SIDE * 32 // self.bits
        found = torch.empty(len(self), columns, dtype=dtype, device=self.words.device)
        grid = self.words.shape[0], columns // UNIT
        turn_back[grid](
            self.words, self.ends, found, columns, self.bits, self.group, is_interpreted()
        )
        return found


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 [tiles, steps, 16, 16] of codes uint8 [outputs, columns]."""
    steps = codes.view(-1, _SIDE, codes.shape[1] * bits // 512, 32 // bits, _SIDE)
    parts = steps.permute(0, 2, 1, 4, 3)
    if bits < 8:
        parts = parts[..., ::2] | parts[..., 1::2] << bits
    return parts.contiguous().view(torch.int32).squeeze(-1)


@triton.jit
def load_words(words, place, columns, start, BITS: tl.constexpr):
    """Words [outputs, 16] of the step that begins at column `start`. place: outputs' numbers."""
    CODES: tl.constexpr = 32 // BITS
    of_tile = place // 16 * (columns // CODES * 16) + place % 16 * 16
    return tl.load(words + of_tile[:, None] + start // CODES * 16 + tl.arange(0, 16)[None, :])


@triton.jit
def load_ends(ends, place, groups, group, BITS: tl.constexpr):
    """Scale and low [outputs] of a group, in float32; of 4 bits the low is of the code -16."""
    COUNT: tl.constexpr = BITS // 4
    at = ends + (place // 16 * groups + group) * (16 * COUNT) + place % 16
    both = tl.load(at)
    if BITS == 8:
        scale = both.to(tl.float32, bitcast=True)
        low = tl.load(at + 16).to(tl.float32, bitcast=True)
    else:
        scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        low = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        low -= 16.0 * scale
    return scale, low


@triton.jit
def numbers_of(
    words, scale, low, NUMBER: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """What is multiplied [outputs, 16] of the words' codes with that number, as a KIND.

    A code in the last bits of 2**4, or of 2**23, makes that number and the code together: no
    instruction converts it. WIDE: the interpreter runs no instruction by name.
    """
    LEFT: tl.constexpr = 19 - 4 * NUMBER
    if BITS == 8:
        code = (words >> 8 * NUMBER) & 0xFF | 0x4B000000
        value = code.to(tl.float32, bitcast=True) - 8388608.0
    else:
        moved = words << LEFT if LEFT >= 0 else words >> -LEFT
        if WIDE:
            moved = moved & 0x780000 | 0x41800000
        else:  # else in two
            both: tl.constexpr = "lop3.b32 $0, $1, 0x780000, 0x41800000, 0xEA;"
            moved = tl.inline_asm_elementwise(
                both, "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1
            )
        value = moved.to(tl.float32, bitcast=True)
    return tl.fma(value, scale[:, None], low[:, None]).to(KIND)


@triton.jit
def sum_codes(
    x, words, ends, place, first, last, columns, real,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums [OUTPUTS, ROWS] over columns first to last, sixteen after sixteen as of plain weights.

    x: the first of ROWS rows, of which some are `real`. place: outputs' numbers [OUTPUTS].
    """
    STEP: tl.constexpr = 512 // BITS
    at = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, 16)[None, :]
    groups = tl.cdiv(columns, GROUP)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, last, STEP, num_stages=STAGES):
        packed = load_words(words, place, columns, start, BITS)
        for number in tl.static_range(STEP // 16):
            if 16 * number % GROUP == 0:
                group = (start + 16 * number) // GROUP
                scale, low = load_ends(ends, place, groups, group, BITS)
            left = numbers_of(packed, scale, low, number, BITS, x.dtype.element_ty, WIDE)
            right = tl.load(x + at + start + 16 * number, mask=real[:, None], other=0.0)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit
def turn_back(
    words, ends, out, columns, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr
):
    """out[outputs, columns] of the codes; 16 outputs and a unit of columns a program."""
    place = tl.program_id(0) * 16 + tl.arange(0, 16)
    groups = tl.cdiv(columns, GROUP)
    at = out + place.to(tl.int64)[:, None] * columns + tl.arange(0, 16)[None, :]
    for step in tl.static_range(BITS // 4):
        start = tl.program_id(1) * 128 + step * (512 // BITS)
        packed = load_words(words, place, columns, start, BITS)
        for number in tl.static_range(32 // BITS):
            if 16 * number % GROUP == 0:
                group = (start + 16 * number) // GROUP
                scale, low = load_ends(ends, place, groups, group, BITS)
            value = numbers_of(packed, scale, low, number, BITS, out.dtype.element_ty, WIDE)
            tl.store(at + start + 16 * number, value)
