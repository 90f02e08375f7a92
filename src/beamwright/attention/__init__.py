"""Attention over tree-structured KV: `reference` oracle, `dense` per-beam copy, `tree`.

One row of the table per backend; `layerwise` wraps one and streams its KV. Knows no strategies
and no schedules.
"""

from __future__ import annotations

from beamwright.attention.dense import DenseAttention
from beamwright.attention.layerwise import LayerwiseAttention
from beamwright.attention.reference import ReferenceAttention
from beamwright.attention.tree import TreeAttention
from beamwright.errors import InputError
from beamwright.protocols import AttentionBackend

BACKENDS: dict[str, type[ReferenceAttention] | type[DenseAttention] | type[TreeAttention]] = {
    "reference": ReferenceAttention,
    "dense": DenseAttention,
    "tree": TreeAttention,
}


def make_attention(name: str) -> AttentionBackend:
    """The backend of that name; `auto` is `tree`.

    Raises:
        InputError: if there is no such backend.
    """
    chosen = "tree" if name == "auto" else name
    if chosen not in BACKENDS:
        raise InputError(f"--attention {name!r}: choose one of {', '.join(BACKENDS)}")
    return BACKENDS[chosen]()


__all__ = ["BACKENDS", "LayerwiseAttention", "make_attention"]
