"""The search tree of one problem: nodes (steps), their states and stop reasons, and the tree hash.

This package imports no torch, touches no KV and knows no strategy.
"""

from beamwright.tree.conversation import Conversation, Problem, RawPrompt
from beamwright.tree.difference import (
    TreeDifference,
    find_first_difference,
    first_differing_round,
    round_digests,
)
from beamwright.tree.node import (
    COMPLETE_STOPS,
    Lineage,
    Node,
    NodeState,
    Sees,
    StopReason,
    TopTokens,
    Turn,
    group_by_root,
    nodes_on_paths,
)
from beamwright.tree.search_tree import (
    SearchTree,
    make_child,
    make_given_path,
    repeated_tokens,
    tree_hash,
)

__all__ = [
    "COMPLETE_STOPS", "Conversation", "Lineage", "Node", "NodeState", "Problem", "RawPrompt",
    "SearchTree", "Sees", "StopReason", "TopTokens", "TreeDifference", "Turn",
    "find_first_difference", "first_differing_round", "group_by_root", "make_child",
    "make_given_path", "nodes_on_paths", "repeated_tokens", "round_digests", "tree_hash",
]  # fmt: skip
