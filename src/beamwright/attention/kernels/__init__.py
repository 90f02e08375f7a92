"""Attention kernels in Triton, over paged KV. Triton is loaded only when a kernel backend is made.

`worklist` cuts paths into parts, `programs` holds the kernels, `launch` starts them on tensors, and
`views` are the backends. Their oracle is `attention.reference`. Here: can they run? Knows devices
and dtypes; loads no Triton unless it has to.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def triton_version() -> str | None:
    """Version of the installed Triton, or None."""
    if find_spec("triton") is None:
        return None
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"


@cache
def is_interpreted() -> bool:
    """True if Triton's interpreter runs the kernels (TRITON_INTERPRET=1). Needs Triton."""
    from triton import JITFunction  # noqa: PLC0415 (optional)

    from beamwright.attention.kernels.programs import attend_parts  # noqa: PLC0415

    return not isinstance(attend_parts, JITFunction)


def why_no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on such tensors, in half a sentence; None if they can."""
    if find_spec("triton") is None:  # its version is read from files, and views ask this
        return "triton is not installed (pip install triton)"
    if device.type == "cuda" and not has_matrix_units(device):
        return "the kernels need compute capability 8.0, which this card has not"
    if dtype not in KERNEL_DTYPES:
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda" and not is_interpreted():
        return f"Triton compiles for CUDA, not for {device.type} (but see TRITON_INTERPRET=1)"
    return None


def has_matrix_units(device: torch.device) -> bool:
    """True if this card multiplies bfloat16 itself (compute capability 8.0); so if none is here."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def begins_early(device: torch.device) -> bool:
    """True if a kernel may begin there before the one ahead of it has ended (capability 9.0)."""
    return _capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """True if this card multiplies for groups of four warps."""
    return _capability(device)[0] == 9


def is_small(device: torch.device) -> bool:
    """True if a multiprocessor has 100 KiB to share: RTX cards' (8.6, 8.9, 12.0)."""
    capability = _capability(device)
    return capability in ((8, 6), (8, 9)) or capability >= (12, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA card; none of anything else. AMD's cards are called `cuda`, too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
