"""A recorded tree: its shape without its text, to replay a search under another schedule.

Knows lineage, counts of tokens, stops, states and scores; no token ids, no KV. The file is JSON:
`solve --record-tree` writes it, `simulate` replays it.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.files import read_regular, write_whole
from beamwright.tree import Node, NodeState, SearchTree, StopReason

VERSION = 1
_MOST = sys.float_info.max
_STATES = tuple(state for state in NodeState if state is not NodeState.OPEN)
_TREE_KEYS = ("version", "problem_id", "prompt_tokens", "rounds", "nodes")
_NODE_KEYS = ("lineage", "tokens", "stop", "state", "score")


@dataclass(frozen=True)
class RecordedNode:
    """A decoded step.

    lineage: child ordinals from the root, the problem id left out. tokens: of this step.
    """

    lineage: tuple[int, ...]
    tokens: int
    stop: StopReason
    state: NodeState
    score: float | None

    @property
    def round(self) -> int:
        """The round in which the node was opened; the first is 1. It is the node's depth."""
        return len(self.lineage)


@dataclass(frozen=True)
class RecordedTree:
    """A search that has ended. `nodes` are in lineage order; the root is the prompt.

    prompt_tokens: tokens of the prompt. rounds: how many rounds the search took.
    """

    problem_id: str | int
    prompt_tokens: int
    rounds: int
    nodes: tuple[RecordedNode, ...]

    def children(self) -> dict[tuple[int, ...], tuple[RecordedNode, ...]]:
        """Children by their parent's lineage, the root's under `()`; leaves are left out."""
        found: dict[tuple[int, ...], list[RecordedNode]] = {}
        for node in self.nodes:
            found.setdefault(node.lineage[:-1], []).append(node)
        return {lineage: tuple(nodes) for lineage, nodes in found.items()}


# --- writing ---------------------------------------------------------------------------------


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
                "score": None
                if node.score is None or not math.isfinite(node.score)
                else node.score,
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


# --- reading ---------------------------------------------------------------------------------


def read_recorded(path: Path) -> RecordedTree:
    """Read a recorded tree.

    Raises:
        InputError: if the file cannot be read or is not a recorded tree; says what is wrong.
    """
    try:
        content = json.loads(read_regular(path), parse_constant=_reject_constant)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON") from error
    try:
        return _parse_tree(content)
    except _MalformedError as error:
        raise InputError(f"{path}: not a recorded tree: {error}") from error


class _MalformedError(Exception):
    """One line that says what is wrong with a recording."""


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_tree(content: Any) -> RecordedTree:
    if not isinstance(content, dict):
        raise _MalformedError("the file does not hold an object")
    if content.get("version") != VERSION:
        raise _MalformedError(f"version is {content.get('version')!r}, not {VERSION}")
    _expect_keys(content, _TREE_KEYS, "the file")
    problem_id = content["problem_id"]
    if not isinstance(problem_id, str | int) or isinstance(problem_id, bool):
        raise _MalformedError(f"problem_id is {problem_id!r}, neither text nor a whole number")
    if not isinstance(content["nodes"], list):
        raise _MalformedError("nodes is not a list")
    tree = RecordedTree(
        problem_id=problem_id,
        prompt_tokens=_whole(content, "prompt_tokens", least=1),
        rounds=_whole(content, "rounds", least=0),
        nodes=tuple(_parse_node(node, f"nodes[{i}]") for i, node in enumerate(content["nodes"])),
    )
    _check_lineages(tree)
    return tree


def _parse_node(content: Any, where: str) -> RecordedNode:
    if not isinstance(content, dict):
        raise _MalformedError(f"{where} is not an object")
    _expect_keys(content, _NODE_KEYS, where)
    lineage = content["lineage"]
    if not isinstance(lineage, list) or not lineage or not all(map(_is_ordinal, lineage)):
        raise _MalformedError(f"{where}: lineage is {lineage!r}, not a list of child ordinals")
    score = content["score"]
    if score is not None and (not isinstance(score, int | float) or isinstance(score, bool)):
        raise _MalformedError(f"{where}: score is {score!r}, neither a number nor null")
    if score is not None and not -_MOST < score < _MOST:  # 1e999 is JSON
        raise _MalformedError(f"{where}: score is too large for a number")
    return RecordedNode(
        lineage=tuple(lineage),
        tokens=_whole(content, "tokens", least=1, where=where),
        stop=StopReason(_one_of(content, "stop", tuple(StopReason), where)),
        state=NodeState(_one_of(content, "state", _STATES, where)),
        score=None if score is None else float(score),
    )


def _check_lineages(tree: RecordedTree) -> None:
    """Every node follows its parent, a kept node, and the sibling with the ordinal before."""
    num_children: dict[tuple[int, ...], int] = {(): 0}
    last: tuple[int, ...] = ()
    for i, node in enumerate(tree.nodes):
        where = f"nodes[{i}] ({'.'.join(map(str, node.lineage))})"
        parent, ordinal = node.lineage[:-1], node.lineage[-1]
        if node.lineage <= last:
            raise _MalformedError(f"{where} is out of lineage order")
        if parent not in num_children:
            raise _MalformedError(f"{where}: its parent is missing or was not kept")
        if ordinal != num_children[parent]:
            raise _MalformedError(f"{where}: child {num_children[parent]} of its parent is missing")
        if node.round > tree.rounds:
            raise _MalformedError(f"{where} is deeper than the {tree.rounds} rounds")
        num_children[parent] += 1
        if node.state is NodeState.KEPT:
            num_children[node.lineage] = 0
        last = node.lineage


def _expect_keys(content: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    missing = [key for key in keys if key not in content]
    unknown = [key for key in content if key not in keys]
    if missing:
        raise _MalformedError(f"{where} lacks {', '.join(missing)}")
    if unknown:
        raise _MalformedError(f"{where} has unknown {', '.join(map(repr, unknown))}")


def _whole(content: Mapping[str, Any], key: str, least: int, where: str = "") -> int:
    value = content[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        prefix = f"{where}: " if where else ""
        raise _MalformedError(f"{prefix}{key} is {value!r}, not a whole number from {least} up")
    return value


def _is_ordinal(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _one_of(content: Mapping[str, Any], key: str, known: Sequence[str], where: str) -> str:
    value = content[key]
    if not isinstance(value, str) or value not in known:
        raise _MalformedError(f"{where}: {key} is {value!r}, not one of {', '.join(known)}")
    return value
