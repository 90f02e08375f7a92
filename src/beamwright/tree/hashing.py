"""tree_hash: one number that says two searches grew the same tree (docs/architecture.md)."""

from __future__ import annotations

import hashlib

from beamwright.tree.node import NodeState
from beamwright.tree.search_tree import SearchTree


def tree_hash(tree: SearchTree) -> str:
    """SHA-256 over committed nodes in lineage order: tokens, stop reason, kept or pruned.

    Scores are left out: they are compared apart, to 1e-4.
    """
    digest = hashlib.sha256()
    for node in tree.nodes():
        if node.state is NodeState.OPEN:
            continue
        kept = "pruned" if node.state is NodeState.PRUNED else "kept"
        ordinals = ".".join(map(str, node.lineage[1:]))
        tokens = ",".join(map(str, node.token_ids))
        digest.update(f"{ordinals}|{tokens}|{node.stop}|{kept}\n".encode())
    return digest.hexdigest()
