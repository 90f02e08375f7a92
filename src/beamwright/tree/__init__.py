"""The problem to solve, and the search tree: nodes, lineage, stop reasons, tree hash.

This package imports no torch, touches no KV and knows no strategy.
"""

from beamwright.tree.conversation import Conversation, Problem, RawPrompt
from beamwright.tree.node import (
    COMPLETE_STOPS,
    Lineage,
    Node,
    NodeState,
    Sees,
    StopReason,
    TopTokens,
    Turn,
    by_root,
    on_paths,
)
from beamwright.tree.parting import Parting, first_other, round_digests, where_they_part
from beamwright.tree.search_tree import SearchTree, given_path, repeated_tokens, tree_hash, unborn

__all__ = [
    "COMPLETE_STOPS", "Conversation", "Lineage", "Node", "NodeState", "Parting", "Problem",
    "RawPrompt", "SearchTree", "Sees", "StopReason", "TopTokens", "Turn", "by_root", "first_other",
    "given_path", "on_paths", "repeated_tokens", "round_digests", "tree_hash", "unborn",
    "where_they_part",
]  # fmt: skip
