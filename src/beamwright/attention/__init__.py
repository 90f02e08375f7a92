"""Attention over tree-structured KV: `reference` oracle, `dense` per-beam copy, `tree`.

One row of the table per backend. `tree` and `dense` have Triton kernels (`kernels`), which
`make_attention` takes where they can run. Knows no strategies and no schedules.
"""

from __future__ import annotations

import torch

from beamwright.attention.dense import DenseAttention
from beamwright.attention.kernels import why_no_kernels
from beamwright.attention.protocols import AttentionBackend
from beamwright.attention.reference import ReferenceAttention
from beamwright.attention.tree import TreeAttention
from beamwright.errors import InputError

BACKENDS: dict[str, type[ReferenceAttention] | type[DenseAttention] | type[TreeAttention]] = {
    "reference": ReferenceAttention,
    "dense": DenseAttention,
    "tree": TreeAttention,
}
"""Plain torch, on any device."""

KERNEL_BACKENDS = ("triton-tree", "triton-dense")
"""The same layouts with Triton kernels."""

_CPU = torch.device("cpu")


def make_attention(
    name: str, device: torch.device = _CPU, dtype: torch.dtype = torch.float32
) -> AttentionBackend:
    """The backend of that name for tensors of this kind; `auto` is `tree`.

    On CUDA, `tree` and `dense` run Triton kernels if Triton is there and knows the dtype, else
    plain torch: the backend's own `name` says which. `triton-tree` and `triton-dense` insist.

    Raises:
        InputError: if there is no such backend, or its kernels cannot run here.
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
    """Raises InputError if a row's bits would follow its batch in this attention on a GPU.

    The kernels have fixed tiles, and `reference` attends row by row. Plain torch packs a batch into
    products whose sizes, and with them a GPU's kernels and their order of sums, follow the batch.
    """
    if device.type != "cuda" or backend.name not in ("tree", "dense"):
        return
    reason = why_no_kernels(device, dtype) or "layer-wise offloading cannot wrap them"
    raise InputError(
        f"--deterministic on {device}: attention has to run in kernels, and {reason}; "
        "use --attention reference and no --schedule layerwise"
    )


def _kernels(name: str) -> AttentionBackend:
    from beamwright.attention.kernels.views import KernelAttention  # noqa: PLC0415 (loads Triton)

    return KernelAttention(name)
