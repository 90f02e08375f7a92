"""A recorded tree: the shape of a search that has ended, to replay it under another schedule.

Knows lineage, counts of tokens, stops, states and scores; no text, no token ids, no KV. The file is
JSON: `solve --record-tree` writes it, `simulate` replays it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from beamwright.errors import InputError
from beamwright.io import read_object, write_whole
from beamwright.tree.node import Node, NodeState, StopReason
from beamwright.tree.search_tree import SearchTree

VERSION = 1
_Count = Annotated[int, Strict(), Field(ge=0)]
_Tokens = Annotated[int, Strict(), Field(ge=1)]
_Score = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_WHOLE = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_WHOLE)
class RecordedNode:
    """A decoded step.

    lineage: child ordinals from the root, the problem id left out. tokens: of this step.
    """

    lineage: Annotated[tuple[_Count, ...], Field(min_length=1)]
    tokens: _Tokens
    stop: StopReason
    state: NodeState
    score: _Score | None

    @property
    def round(self) -> int:
        """The round in which the node was opened; the first is 1. It is the node's depth."""
        return len(self.lineage)


@dataclass(frozen=True, config=_WHOLE)
class RecordedTree:
    """The search. `nodes` are in lineage order; the root is the prompt.

    prompt_tokens: tokens of the prompt. rounds: how many rounds the search took.
    """

    problem_id: Annotated[int, Strict()] | Annotated[str, Strict()]
    prompt_tokens: _Tokens
    rounds: _Count
    nodes: tuple[RecordedNode, ...]


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


# --- reading ---------------------------------------------------------------------------------


def read_recorded(path: Path) -> RecordedTree:
    """Read a recorded tree.

    Raises:
        InputError: if the file cannot be read or is not a recorded tree; says what is wrong.
    """
    content = read_object(path, "a recorded tree")
    version = content.pop("version", None)
    try:
        if version != VERSION:
            raise ValueError(f"version is {version!r}, not {VERSION}")
        tree = TypeAdapter(RecordedTree).validate_python(content)
        _check_lineages(tree)
    except ValueError as error:
        fault = describe_fault(error) if isinstance(error, ValidationError) else error
        raise InputError(f"{path}: not a recorded tree: {fault}") from error
    return tree


def describe_fault(error: ValidationError) -> str:
    """What pydantic found first, with its place: `nodes.1.tokens: ..., got 0`."""
    fault = error.errors()[0]
    what = f"{'.'.join(map(str, fault['loc'])):.80}: {fault['msg']}"
    missing = fault["type"] in ("missing", "missing_argument")
    return what if missing else f"{what}, got {fault['input']!r:.80}"


def _check_lineages(tree: RecordedTree) -> None:
    """Every node follows its parent, a kept node, and the sibling with the ordinal before."""
    num_children: dict[tuple[int, ...], int] = {(): 0}
    last: tuple[int, ...] = ()
    for i, node in enumerate(tree.nodes):
        where = f"nodes[{i}] ({'.'.join(map(str, node.lineage))})"
        parent, ordinal = node.lineage[:-1], node.lineage[-1]
        if node.state is NodeState.OPEN:
            raise ValueError(f"{where}: state is 'open': it was not decoded")
        if node.lineage <= last:
            raise ValueError(f"{where} is out of lineage order")
        if parent not in num_children:
            raise ValueError(f"{where}: its parent is missing or was not kept")
        if ordinal != num_children[parent]:
            raise ValueError(f"{where}: child {num_children[parent]} of its parent is missing")
        if node.round > tree.rounds:
            raise ValueError(f"{where} is deeper than the {tree.rounds} rounds")
        num_children[parent] += 1
        if node.state is NodeState.KEPT:
            num_children[node.lineage] = 0
        last = node.lineage
