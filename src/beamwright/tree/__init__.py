"""The search tree: nodes, lineage, stop reasons, hash. Knows no torch, no KV, no strategy."""

from beamwright.tree.hashing import tree_hash
from beamwright.tree.node import (
    COMPLETE_STOPS,
    Lineage,
    Node,
    NodeState,
    StopReason,
    TopTokens,
    Turn,
    by_root,
)
from beamwright.tree.recorded import RecordedNode, RecordedTree
from beamwright.tree.search_tree import SearchTree, unborn

__all__ = [
    "COMPLETE_STOPS",
    "Lineage",
    "Node",
    "NodeState",
    "RecordedNode",
    "RecordedTree",
    "SearchTree",
    "StopReason",
    "TopTokens",
    "Turn",
    "by_root",
    "tree_hash",
    "unborn",
]
