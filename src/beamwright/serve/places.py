"""Where a step's KV is, for the page. Knows what a generator has left at a node."""

from __future__ import annotations

from beamwright.engine.chains import GeneratorState
from beamwright.engine.paths import OWNER
from beamwright.tree import Node


def kv_place(node: Node) -> str | None:
    """`device`, `host` or `both`; None for a step without KV. In the thread that moves it."""
    state: GeneratorState | None = node.handles.get(OWNER)
    return None if state is None else state.place
