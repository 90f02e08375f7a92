"""The search tree: nodes, lineage, stop reasons, hash. Knows no torch, no KV, no strategy."""

from beamwright.tree.hashing import tree_hash
from beamwright.tree.node import Node, NodeState, StopReason, Turn
from beamwright.tree.search_tree import SearchTree

__all__ = ["Node", "NodeState", "SearchTree", "StopReason", "Turn", "tree_hash"]
