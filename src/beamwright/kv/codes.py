"""KV in 8 bits: a token's keys or values of one head as codes, and a power of two that they share.

Since the scale is a power of two, a code times its scale is exact in every dtype that models run
in, and what has been rounded once is rounded to the same numbers again. So whatever reads them,
tails, blocks, the host's copies, or a kernel, sees the same. Knows no blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beamwright.sections import KVDtype

_BIAS, _MANTISSA_BITS = 127, 23  # of a float32
_EXPONENTS = -100, 100
# Codes are at most a limit, which is below 2 ** bits. Every code times its scale must be a float16,
# where that is computed with: none below the least, none beyond the largest.
_GRIDS = {"int8": (127, 7, (-24, 9)), "fp8": (448, 9, (-15, 7))}


def powers(exponents: Tensor) -> Tensor:
    """2 ** exponents in float32, exactly (`pow` promises nothing)."""
    return ((exponents.to(torch.int32) + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def _on_grid(values: Tensor, kept: KVDtype) -> tuple[Tensor, Tensor]:
    """Codes as numbers [..., head_dim], at least float32, and exponents [...]."""
    limit, bits, half_exponents = _GRIDS[kept]
    low, high = half_exponents if values.dtype == torch.float16 else _EXPONENTS
    wide = values.double() if values.dtype == torch.float64 else values.float()
    mantissa, exponents = torch.frexp(wide.abs().amax(-1))
    exponents = exponents - bits + (mantissa > limit / 2**bits)
    exponents = exponents.clamp_(low, high)
    scaled = (wide * powers(-exponents).unsqueeze(-1)).clamp_(-limit, limit)
    if kept == "int8":
        return scaled.round_(), exponents
    return scaled.to(torch.float8_e4m3fn).to(wide.dtype), exponents


def rounded(values: Tensor, kept: KVDtype) -> Tensor:
    """Values [..., head_dim] as they will be read, in their dtype; a second time they stay."""
    codes, exponents = _on_grid(values, kept)
    return codes.mul_(powers(exponents).unsqueeze(-1)).to(values.dtype)


def encoded(values: Tensor, kept: KVDtype) -> tuple[Tensor, Tensor]:
    """Codes [..., head_dim] and exponents [...], a byte each."""
    codes, exponents = _on_grid(values, kept)
    if kept == "fp8":
        return codes.to(torch.float8_e4m3fn).view(torch.int8), exponents.to(torch.int8)
    return codes.to(torch.int8), exponents.to(torch.int8)


def decoded(codes: Tensor, exponents: Tensor, kept: KVDtype, dtype: torch.dtype) -> Tensor:
    """What was `encoded`, in a model's dtype."""
    numbers = (codes.view(torch.float8_e4m3fn) if kept == "fp8" else codes).float()
    return numbers.mul_(powers(exponents).unsqueeze(-1)).to(dtype)


def hadamard(head_dim: int) -> tuple[Tensor, float]:
    """A matrix [head_dim, head_dim] that spreads what is large in few dimensions over many.

    Of blocks as large as the power of two that divides head_dim. Its entries are powers of two, so
    it is exact in any dtype; a product of two vectors that went through it has to be multiplied by
    the second value returned, 1 or 1/2.
    """
    size = head_dim & -head_dim
    steps = size.bit_length() - 1
    block = torch.ones(1, 1)
    for _ in range(steps):
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block * 2.0 ** -(steps // 2)
    return torch.block_diag(*[block] * (head_dim // size)), 0.5 if steps % 2 else 1.0
