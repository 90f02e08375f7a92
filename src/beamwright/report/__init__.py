"""Seeing a search: a page of its tree, a trace of its time, pages of evaluations. No torch."""

from beamwright.report.trace_file import write_trace
from beamwright.report.tree_page import ShownTree, write_tree_page

__all__ = ["ShownTree", "write_trace", "write_tree_page"]
