"""Weights in 4 or 8 bits on a GPU: their memory layout, and Triton code that dequantises them.

A weight is code * scale + low, where `low` is the value of code 0. The result is rounded once, to
the dtype of the activations. So the kernels' product is bitwise equal to that of the dequantised
weight.

Layout: a tile of 1 KiB has 16 outputs (rows of the weight) and 16 words of 32 bits for each output.
Word t of an output holds the codes of columns t, t + 16, t + 32, ..., beginning with the lowest
bits. So a copy moves 16 bytes at a time. The nth codes of a thread's words are those that this
thread multiplies in the nth 16 columns, so threads need not exchange data.

This module is imported only where the kernels run. It does not postpone annotations, because Triton
reads `tl.constexpr` from them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from beamwright.attention.kernels import is_interpreted
from beamwright.models.grouped import GroupedLinear

# Columns of a unit. A sum over columns is split into parts of whole units (see `streaming`).
UNIT = 128
_SIDE = 16  # outputs of a tile, and words per output; adjacent words hold adjacent columns
# Group size that stands for a whole row. With this constant, one compiled kernel serves all widths.
_ROW = 1 << 30
_BLOCK_VALUES = 1 << 24  # values converted to the layout at once


@dataclass(frozen=True)
class Codes:
    """A quantised weight [outputs, columns] in the layout of the kernels."""

    # The codes, int32 [outputs / 16, columns * bits / 512, 16 outputs, 16].
    words: Tensor
    # Scale and low of each group and output, int32 [outputs / 16, groups, words, 16 outputs].
    #
    # With 4 bits one word holds both in float16, the scale in its low half. With 8 bits two words
    # hold one float32 each.
    scales_and_lows: Tensor
    bits: int
    # Columns of a group, or `_ROW` if each row is one group.
    group: int

    def __len__(self) -> int:
        """Return the number of outputs."""
        return self.words.shape[0] * _SIDE

    @classmethod
    def of(cls, linear: GroupedLinear) -> "Codes | None":
        """Convert a projection's weight; None if its size is no multiple of tiles and groups."""
        (outputs, columns), bits, ends = linear.size, linear.bits, linear.scales_and_lows
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
        """Return the weight of outputs `first` to `last` - 1; both must be multiples of 16."""
        tiles = slice(first // _SIDE, last // _SIDE)
        return Codes(self.words[tiles], self.scales_and_lows[tiles], self.bits, self.group)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [outputs, columns], as the kernels multiply with it."""
        columns = self.words.shape[1] * _SIDE * 32 // self.bits
        out = torch.empty(len(self), columns, dtype=dtype, device=self.words.device)
        grid = self.words.shape[0], columns // UNIT
        dequantise_tiles[grid](
            self.words, self.scales_and_lows, out, columns, self.bits, self.group, is_interpreted()
        )
        return out


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 [outputs, columns], into words, int32 [tiles, steps, 16 outputs, 16]."""
    steps = codes.view(-1, _SIDE, codes.shape[1] * bits // 512, 32 // bits, _SIDE)
    parts = steps.permute(0, 2, 1, 4, 3)
    if bits < 8:
        parts = parts[..., ::2] | parts[..., 1::2] << bits
    return parts.contiguous().view(torch.int32).squeeze(-1)


@triton.jit
def load_words(words, place, columns, start, BITS: tl.constexpr):
    """Load the words [outputs, 16] with the codes of 512 / BITS columns from column `start`.

    place: the indices of the outputs [outputs].
    """
    CODES: tl.constexpr = 32 // BITS
    of_tile = place // 16 * (columns // CODES * 16) + place % 16 * 16
    return tl.load(words + of_tile[:, None] + start // CODES * 16 + tl.arange(0, 16)[None, :])


@triton.jit
def load_scale_and_low(ends, place, groups, group, BITS: tl.constexpr):
    """Load scale and low [outputs] of a group, in float32.

    With 4 bits the returned low is that of code -16, because `dequantise_codes` adds 16.
    """
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
def dequantise_codes(
    words, scale, low, NUMBER: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Dequantise code NUMBER of each word to numbers [outputs, 16] of dtype KIND.

    No instruction converts a code to a float. Instead the code is placed into the mantissa of
    2**4 (4 bits) or 2**23 (8 bits), which gives that power plus the code.
    WIDE: True in the interpreter, which has no inline assembly.
    """
    LEFT: tl.constexpr = 19 - 4 * NUMBER
    if BITS == 8:
        code = (words >> 8 * NUMBER) & 0xFF | 0x4B000000
        value = code.to(tl.float32, bitcast=True) - 8388608.0
    else:
        moved = words << LEFT if LEFT >= 0 else words >> -LEFT
        if WIDE:
            moved = moved & 0x780000 | 0x41800000
        else:  # one instruction: for the same expression the compiler emits two
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
    """Return weight * rows [OUTPUTS, ROWS], with the weight dequantised on the fly.

    The products are summed over the columns `first` to `last` - 1, 16 columns at a time, in the
    same order as with plain weights.
    x: pointer to the first of ROWS rows; `real` [ROWS] masks out padding rows.
    place: the indices of the outputs [OUTPUTS].
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
                scale, low = load_scale_and_low(ends, place, groups, group, BITS)
            left = dequantise_codes(packed, scale, low, number, BITS, x.dtype.element_ty, WIDE)
            right = tl.load(x + at + start + 16 * number, mask=real[:, None], other=0.0)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit
def dequantise_tiles(
    words, ends, out, columns, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr
):
    """Write the dequantised weight to out [outputs, columns].

    Each program writes 16 outputs and one unit of columns.
    """
    place = tl.program_id(0) * 16 + tl.arange(0, 16)
    groups = tl.cdiv(columns, GROUP)
    at = out + place.to(tl.int64)[:, None] * columns + tl.arange(0, 16)[None, :]
    for step in tl.static_range(BITS // 4):
        start = tl.program_id(1) * 128 + step * (512 // BITS)
        packed = load_words(words, place, columns, start, BITS)
        for number in tl.static_range(32 // BITS):
            if 16 * number % GROUP == 0:
                group = (start + 16 * number) // GROUP
                scale, low = load_scale_and_low(ends, place, groups, group, BITS)
            value = dequantise_codes(packed, scale, low, number, BITS, out.dtype.element_ty, WIDE)
            tl.store(at + start + 16 * number, value)
