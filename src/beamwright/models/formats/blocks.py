"""GGUF's blocks as codes with scales and lows, as `GroupedLinear` keeps them: nothing is rounded.

Blocks are uint8 [count, bytes]; what comes of them is `Groups` with a block in each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from beamwright.models.formats.quantised import Groups


def _half(blocks: Tensor, first: int) -> Tensor:
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Of each run of bytes the low ones, then the high ones."""
    runs = packed.unflatten(1, (-1, run))
    return torch.cat([runs & 15, runs >> 4], dim=-1).flatten(1)


def _fifth(packed: Tensor) -> Tensor:
    """The fifth bit of each of 32 values, of 4 bytes."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and lows of 8 groups: 6 bits each in 12 bytes, times a float16."""
    first, second, third = blocks[:, 4:16].split(4, dim=1)
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    low = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return scale * _half(blocks, 0), -(low * _half(blocks, 2))


def _q4_0(blocks: Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(4, _nibbles(blocks[:, 2:], 16), scale, -8 * scale)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(4, _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(8, _nibbles(blocks[:, 6:], 16) | _fifth(blocks[:, 2:6]), scale, -16 * scale)


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth(blocks[:, 4:8])
    return Groups(8, codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(8, blocks[:, 2:] ^ 128, scale, -128 * scale)


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(4, _nibbles(blocks[:, 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return Groups(8, _nibbles(blocks[:, 48:], 32) | bits.flatten(1) << 4, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    upper = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> torch.arange(0, 8, 2)[:, None] & 3
    codes = _nibbles(blocks[:, :128], 64) | upper.to(torch.uint8).flatten(1) << 4
    scale = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    return Groups(8, codes, scale, -32 * scale)


PARTS: dict[int, Callable[[Tensor], Groups]] = {
    2: _q4_0, 3: _q4_1, 6: _q5_0, 7: _q5_1, 8: _q8_0, 12: _q4_k, 13: _q5_k, 14: _q6_k,
}  # fmt: skip
"""By a tensor's type, as GGUF numbers them."""
