"""Seeing a search: a page of its tree, a trace of its time, a recording to replay. No torch."""

from beamwright.report.recorded import (
    RecordedNode,
    RecordedTree,
    read_recorded,
    record_tree,
    write_recorded,
)
from beamwright.report.trace_file import write_trace
from beamwright.report.tree_page import ShownTree, write_tree_page

__all__ = [
    "RecordedNode",
    "RecordedTree",
    "ShownTree",
    "read_recorded",
    "record_tree",
    "write_recorded",
    "write_trace",
    "write_tree_page",
]
