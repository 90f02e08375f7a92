"""A recorded tree: the shape of a search that has ended, to replay it under another schedule.

Knows lineage, counts of tokens, stops, states and scores; no text, no token ids, no KV. The file is
JSON: `solve --record-tree` writes it, `simulate` replays it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from beamwright.io import write_whole
from beamwright.tree.node import Node, NodeState
from beamwright.tree.search_tree import SearchTree

VERSION = 1


def record_tree(tree: SearchTree) -> dict[str, Any]:
    """What is recorded of a search that has ended; steps that were never decoded are left out.

    Where a deadline struck in the middle of a round, the siblings that were decoded are numbered
    without gaps, as they have to be to be replayed. A score that is not finite becomes null.
    """
    lineages: dict[Node, tuple[int, ...]] = {tree.root: ()}
    num_children: Counter[Node] = Counter()
    for node in tree.nodes():
        if node.parent is not None and node.state is not NodeState.OPEN:
            lineages[node] = (*lineages[node.parent], num_children[node.parent])
            num_children[node.parent] += 1
    del lineages[tree.root]
    return {
        "version": VERSION,
        "problem_id": tree.root.problem_id,
        "prompt_tokens": len(tree.root.token_ids),
        # An error may have struck before the last round was counted.
        "rounds": max([tree.rounds, *map(len, lineages.values())]),
        "nodes": [
            {
                "lineage": list(lineage),
                "tokens": len(node.token_ids),
                "stop": str(node.stop),
                "state": str(node.state),
                "score": node.score if math.isfinite(node.score or 0.0) else None,
            }
            for node, lineage in lineages.items()
        ],
    }


def write_recorded(tree: SearchTree, path: Path) -> None:
    """Write a recorded tree.

    Raises:
        InputError: if the file cannot be written.
    """
    write_whole(path, json.dumps(record_tree(tree), allow_nan=False) + "\n")
