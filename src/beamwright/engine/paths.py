"""The segments that hold the generator's KV on the way to a node. Knows no rows and no batch."""

from __future__ import annotations

from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.tree import Node

OWNER = "generator"
"""What a node's handle of the generator is kept under: a `chains.GeneratorState`."""


def path_to(node: Node | None) -> Path:
    """The segments from the root to a node, itself included, as far as they hold anything."""
    if node is None:
        return ()
    segments = (segment_of(each) for each in node.path())
    return tuple(PathPart(s, s.length) for s in segments if s is not None and s.length)


def segment_of(node: Node) -> Segment | None:
    """A node's segment; None where nothing is stored yet."""
    state = node.handles.get(OWNER)
    segment: Segment | None = None if state is None else state.segment
    return segment


def segment_name(node: Node) -> str:
    """What a node's segment is called in timelines."""
    return ".".join(map(str, node.lineage))
