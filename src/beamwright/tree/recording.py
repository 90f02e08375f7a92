"""Record the shape of a finished search as JSON, so that the simulator can replay it.

A record has lineages, token counts, stop reasons, states, scores, rounds and turns. It has no text,
no token ids and no KV. `solve --record-tree` writes it, and the lab's `simulate` replays it with
any schedule.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from beamwright.io import write_atomically
from beamwright.tree.node import Node, NodeState
from beamwright.tree.search_tree import SearchTree

VERSION = 1


def record_tree(tree: SearchTree) -> dict[str, Any]:
    """Return the record of a search that has ended, as JSON data.

    Steps that were never decoded, for example because of a deadline, are left out. The siblings of
    such a step are renumbered without gaps, because a replay needs consecutive child numbers. A
    score that is not finite becomes null.
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
        # An error may have ended the search before the last round was counted.
        "rounds": max([tree.rounds, *map(len, lineages.values())]),
        "nodes": [
            {
                "lineage": list(lineage),
                "tokens": len(node.token_ids),
                "stop": node.stop and str(node.stop),
                "state": str(node.state),
                "score": node.score if math.isfinite(node.score or 0.0) else None,
                "began": node.round,
                "turn": node.turn and ("alone" if node.turn.alone else "follows"),
            }
            for node, lineage in lineages.items()
        ],
    }


def write_tree_record(tree: SearchTree, path: Path) -> None:
    """Write the record of `tree` to the JSON file `path`.

    Raises:
        InputError: if the file cannot be written.
    """
    write_atomically(path, json.dumps(record_tree(tree), allow_nan=False) + "\n")
