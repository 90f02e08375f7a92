"""Where two trees of one problem part: by round from their digests, by token from the trees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from beamwright.tree.node import Lineage, Node, NodeState
from beamwright.tree.search_tree import SearchTree, written

_DIGITS = 8


@dataclass(frozen=True)
class Parting:
    """The first difference, by round and lineage.

    what: other "tokens", another "stop", or "steps" that only one of them has opened: then it was
    chosen otherwise when the round before was scored. lineage: of the step. position: in its path;
    was, now: the token ids there, None where one step has ended already.
    """

    what: Literal["tokens", "stop", "steps"]
    round: int
    lineage: Lineage
    position: int | None = None
    was: int | None = None
    now: int | None = None


def round_digests(tree: SearchTree) -> list[str]:
    """Of the steps that each round has opened: lineages, tokens, stops. The first is round 1.

    What became of a step is left out: a later round may still change that.
    """
    steps = _steps(tree)
    digests = [hashlib.sha256() for _ in range(max((node.round for node in steps), default=0))]
    for node in steps:
        digests[node.round - 1].update(f"{written(node)}\n".encode())
    return [digest.hexdigest()[:_DIGITS] for digest in digests]


def first_other(was: Sequence[str], now: Sequence[str]) -> int | None:
    """The first round whose digests differ, or that only one has; None if there is none."""
    pairs = zip(was, now, strict=False)
    differing = [number for number, (one, other) in enumerate(pairs, 1) if one != other]
    if differing or len(was) != len(now):
        return differing[0] if differing else min(len(was), len(now)) + 1
    return None


def where_they_part(was: SearchTree, now: SearchTree) -> Parting | None:
    """The first difference of what was written; None if there is none."""
    trees = [{(node.round, node.lineage[1:]): node for node in _steps(tree)} for tree in (was, now)]
    for number, lineage in sorted(trees[0].keys() | trees[1].keys()):
        one, other = (steps.get((number, lineage)) for steps in trees)
        if one is None or other is None:
            return Parting("steps", number, lineage)
        if one.token_ids != other.token_ids:
            return Parting("tokens", number, lineage, *_first_token(one, other))
        if one.stop != other.stop:
            return Parting("stop", number, lineage)
    return None


def _first_token(one: Node, other: Node) -> tuple[int, int | None, int | None]:
    """Its position, and what either step has there."""
    ids = one.token_ids, other.token_ids
    place = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), None)
    place = min(map(len, ids)) if place is None else place
    was, now = (tokens[place] if place < len(tokens) else None for tokens in ids)
    return one.start + place, was, now


def _steps(tree: SearchTree) -> list[Node]:
    """Those that are written, in lineage order."""
    nodes = (node for node in tree.nodes() if node.parent is not None)
    return [node for node in nodes if node.state is not NodeState.OPEN]
