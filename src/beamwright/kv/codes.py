"""8-bit KV cache: quantise K and V to int8 or fp8, with a power-of-two scale per token and head.

Since the scale is a power of two, a code times its scale is exact in every dtype that models run
in, and quantising such values again does not change them. So attention computes with equal values,
whether it reads KV from a row's tail, from blocks, from host copies, or within a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beamwright.sections import KVDtype

_BIAS, _MANTISSA_BITS = 127, 23  # exponent bias and mantissa bits of a float32
_EXPONENTS = -100, 100  # smallest and largest exponent of a scale, for dtypes with float32's range
# For each format: the largest code, the bits with code < 2 ** bits, and the exponents allowed for
# float16. With these exponents every code times its scale is a float16, without under- or overflow.
_GRIDS = {"int8": (127, 7, (-24, 9)), "fp8": (448, 9, (-15, 7))}


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** exponents in float32, exactly. (`torch.pow` does not guarantee that.)"""
    return ((exponents.to(torch.int32) + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def _quantise_values(values: Tensor, kept: KVDtype) -> tuple[Tensor, Tensor]:
    """Quantise values [..., head_dim] to codes [..., head_dim] and scale exponents [...].

    The codes are still floating-point numbers, in at least float32.
    """
    limit, bits, half_exponents = _GRIDS[kept]
    low, high = half_exponents if values.dtype == torch.float16 else _EXPONENTS
    wide = values.double() if values.dtype == torch.float64 else values.float()
    mantissa, exponents = torch.frexp(wide.abs().amax(-1))
    exponents = exponents - bits + (mantissa > limit / 2**bits)
    exponents = exponents.clamp_(low, high)
    scaled = (wide * powers_of_two(-exponents).unsqueeze(-1)).clamp_(-limit, limit)
    if kept == "int8":
        return scaled.round_(), exponents
    return scaled.to(torch.float8_e4m3fn).to(wide.dtype), exponents


def round_to_grid(values: Tensor, kept: KVDtype) -> Tensor:
    """Quantise and dequantise values [..., head_dim], in their dtype.

    A second call changes nothing.
    """
    codes, exponents = _quantise_values(values, kept)
    return codes.mul_(powers_of_two(exponents).unsqueeze(-1)).to(values.dtype)


def quantise(values: Tensor, kept: KVDtype) -> tuple[Tensor, Tensor]:
    """Quantise values [..., head_dim] to codes [..., head_dim] and exponents [...], int8 both."""
    codes, exponents = _quantise_values(values, kept)
    if kept == "fp8":
        return codes.to(torch.float8_e4m3fn).view(torch.int8), exponents.to(torch.int8)
    return codes.to(torch.int8), exponents.to(torch.int8)


def dequantise(codes: Tensor, exponents: Tensor, kept: KVDtype, dtype: torch.dtype) -> Tensor:
    """Dequantise codes and exponents that `quantise` returned, to the model's dtype."""
    numbers = (codes.view(torch.float8_e4m3fn) if kept == "fp8" else codes).float()
    return numbers.mul_(powers_of_two(exponents).unsqueeze(-1)).to(dtype)


def hadamard_matrix(head_dim: int) -> tuple[Tensor, float]:
    """Return a Hadamard rotation that makes heads with outliers easier to quantise, and a factor.

    The matrix [head_dim, head_dim] is block diagonal. A block's size is the largest power of two
    that divides head_dim. Its entries are powers of two, so that they are exact in any dtype. The
    product of two rotated vectors must be multiplied by the factor, 1 or 1/2.
    """
    size = head_dim & -head_dim
    steps = size.bit_length() - 1
    block = torch.ones(1, 1)
    for _ in range(steps):
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block * 2.0 ** -(steps // 2)
    return torch.block_diag(*[block] * (head_dim // size)), 0.5 if steps % 2 else 1.0
