"""Which precision `--dtype auto` is: float32 on a CPU, but for large models that lose nothing.

On a card it is bfloat16, or float16 where the card does not multiply that.

In bfloat16 a large model reads half the bytes and multiplies two to four times as fast, where the
CPU has it. It is taken only if a row's bits do not depend on the batch there, so `exact` is kept;
on CPUs that multiply tiles (AMX) they were seen to.
"""

from __future__ import annotations

from functools import cache

import torch

from beamwright.attention.kernels import has_matrix_units
from beamwright.models.decoder import Linear
from beamwright.models.onednn import prepack
from beamwright.models.shape import ModelShape

LARGE_PARAMETERS = 100_000_000
_NATIVE = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "arm_bf16")
_ROWS = (8, 16, 64, 160)


def resolve_dtype(name: str, device: str, shape: ModelShape) -> torch.dtype:
    """The dtype that `--dtype` means for a model on a device; it probes the CPU where it has to."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device != "cpu":
        return torch.bfloat16 if has_matrix_units(torch.device(device)) else torch.float16
    exact = is_faster_in_bfloat16(shape) and products_are_invariant(
        shape.projections, torch.bfloat16
    )
    return torch.bfloat16 if exact else torch.float32


def why_float32(shape: ModelShape) -> str | None:
    """One line for whom bfloat16 would be faster on this CPU; None where it is used, or is not."""
    if not is_faster_in_bfloat16(shape):
        return None
    if products_are_invariant(shape.projections, torch.bfloat16):
        return None
    return (
        "--dtype bfloat16 is faster on this CPU and what the checkpoint is in, but a token's last "
        "bits depend on its batch there (exact: false)"
    )


def is_faster_in_bfloat16(shape: ModelShape) -> bool:
    """A large checkpoint that is in bfloat16, on a CPU that multiplies it."""
    is_large = shape.num_parameters >= LARGE_PARAMETERS
    return shape.stored_bfloat16 and is_large and has_bfloat16()


@cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; False where torch does not say."""
    known = getattr(torch.cpu, "get_capabilities", dict[str, object])
    try:
        found = known()
    except RuntimeError:
        return False
    return any(found.get(name) is True for name in _NATIVE)


@cache
def products_are_invariant(projections: tuple[tuple[int, int], ...], dtype: torch.dtype) -> bool:
    """Whether rows of products [out, in] have the same bits at any batch, as they run on a CPU."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in projections:
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        product = prepack(Linear(weight))
        x = torch.randn(_ROWS[-1], columns, generator=generator).to(dtype)
        whole = product(x)
        if not all(torch.equal(product(x[:count]), whole[:count]) for count in _ROWS):
            return False
    return True
