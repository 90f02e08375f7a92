"""Triton attention kernels over paged KV. This module checks whether they can run on a device.

`worklist` cuts paths into parts, `programs` and `tiles` contain the kernels, `launch` starts them
on tensors, and `views` contains the backends. Tests compare the kernels with
`attention.reference`. Triton is imported only when it is needed.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def triton_version() -> str | None:
    """Return the version of the installed Triton, or None."""
    if find_spec("triton") is None:
        return None
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"


@cache
def is_interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels (TRITON_INTERPRET=1).

    Triton must be installed.
    """
    from triton import JITFunction  # noqa: PLC0415 (optional)

    from beamwright.attention.kernels.programs import attend_parts  # noqa: PLC0415

    return not isinstance(attend_parts, JITFunction)


def why_no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run on tensors of `dtype` on `device`; None if they can."""
    # `triton_version` is not used here: it reads files, and every view calls this function.
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type == "cuda" and not has_matrix_units(device):
        return "the kernels need compute capability 8.0 or later"
    if dtype not in KERNEL_DTYPES:
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda" and not is_interpreted():
        return f"Triton compiles for CUDA, not for {device.type} without TRITON_INTERPRET=1"
    return None


def has_matrix_units(device: torch.device) -> bool:
    """Return True if the GPU has bfloat16 matrix units (capability 8.0), or if there is no GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def can_overlap(device: torch.device) -> bool:
    """Return True if a kernel can start before the previous kernel has ended.

    Programmatic dependent launch needs compute capability 9.0.
    """
    return _capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Return True if the GPU has warp-group matrix products, WGMMA (compute capability 9.x)."""
    return _capability(device)[0] == 9


def has_small_shared_memory(device: torch.device) -> bool:
    """Return True if a multiprocessor has only 100 KiB of shared memory.

    RTX cards with compute capability 8.6, 8.9 or 12.0 have so little.
    """
    capability = _capability(device)
    return capability in ((8, 6), (8, 9)) or capability >= (12, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, and (0, 0) for any other device.

    Torch uses the device type `cuda` for AMD GPUs too.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
