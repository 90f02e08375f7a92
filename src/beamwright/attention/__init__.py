"""Attention backends for KV that is stored as a tree, with prefixes shared by many rows.

The backend `reference` is a slow oracle for tests. `dense` reads one copy of the path per beam.
`tree` reads each shared segment once. `tree` and `dense` also exist as Triton kernels (`kernels`),
which `make_attention` chooses where they can run.
"""

from __future__ import annotations

import torch

from beamwright.attention.dense import DenseAttention
from beamwright.attention.kernels import why_no_kernels
from beamwright.attention.protocols import AttentionBackend
from beamwright.attention.reference import ReferenceAttention
from beamwright.attention.tree import TreeAttention
from beamwright.errors import InputError

# Backends in plain torch, which run on any device.
BACKENDS: dict[str, type[ReferenceAttention] | type[DenseAttention] | type[TreeAttention]] = {
    "reference": ReferenceAttention,
    "dense": DenseAttention,
    "tree": TreeAttention,
}

# Names of the backends that run `tree` and `dense` in Triton kernels.
KERNEL_BACKENDS = ("triton-tree", "triton-dense")

_CPU = torch.device("cpu")


def make_attention(
    name: str, device: torch.device = _CPU, dtype: torch.dtype = torch.float32
) -> AttentionBackend:
    """Return the backend `name` for tensors of `dtype` on `device`; `auto` means `tree`.

    On CUDA, `tree` and `dense` run Triton kernels if Triton is installed and supports the dtype,
    otherwise plain torch. The returned backend's `name` tells which of the two. `triton-tree` and
    `triton-dense` raise an error if the kernels cannot run.

    Raises:
        InputError: if `name` is unknown, or if the required kernels cannot run here.
    """
    chosen = "tree" if name == "auto" else name
    if chosen in KERNEL_BACKENDS:
        reason = why_no_kernels(device, dtype)
        if reason is not None:
            raise InputError(f"--attention {name}: {reason}")
        return _kernels(chosen)
    if chosen not in BACKENDS:
        known = ", ".join((*BACKENDS, *KERNEL_BACKENDS))
        raise InputError(f"--attention {name!r}: choose one of {known}")
    twin = f"triton-{chosen}"
    if device.type == "cuda" and twin in KERNEL_BACKENDS and why_no_kernels(device, dtype) is None:
        return _kernels(twin)
    return BACKENDS[chosen]()


def check_deterministic(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> None:
    """Check that `backend` is batch-invariant on `device`.

    The Triton kernels have fixed tiles, and `reference` attends to one row at a time. On a GPU,
    `tree` and `dense` in plain torch are not batch-invariant: the batch decides the sizes of the
    matrix products, and the GPU library chooses kernels and their order of summation by size.

    Raises:
        InputError: if a row's result would depend on its batch.
    """
    if device.type != "cuda" or backend.name not in ("tree", "dense"):
        return
    reason = why_no_kernels(device, dtype) or "layer-wise offloading cannot wrap them"
    raise InputError(
        f"--deterministic on {device}: attention must run in kernels, but {reason}; "
        "use --attention reference and no --schedule layerwise"
    )


def _kernels(name: str) -> AttentionBackend:
    from beamwright.attention.kernels.views import KernelAttention  # noqa: PLC0415 (loads Triton)

    return KernelAttention(name)
