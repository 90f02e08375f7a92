"""Find the first difference between two search trees of one problem (`beamwright verify`).

The round digests of a receipt suffice to find the first differing round. Two whole trees are needed
to find the first differing token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from beamwright.tree.node import Lineage, Node, NodeState
from beamwright.tree.search_tree import SearchTree, step_line

_DIGITS = 8


@dataclass(frozen=True)
class TreeDifference:
    """The first difference between two trees, in the order of round and lineage."""

    # The kind of difference: the step's tokens, its stop reason, or a step that only one tree has.
    # "steps" means that selection chose differently after the previous round.
    what: Literal["tokens", "stop", "steps"]
    round: int
    lineage: Lineage  # the lineage without the problem id
    position: int | None = None  # position in the path; None unless the tokens differ
    was: int | None = None  # the first tree's token id at `position`; None if its step is shorter
    now: int | None = None  # the second tree's token id at `position`; None if its step is shorter


def round_digests(tree: SearchTree) -> list[str]:
    """Return one digest per round, from round 1 on, of the steps that the round opened.

    A digest covers lineages, tokens and stop reasons. It leaves out node states, because a later
    round may still change them.
    """
    steps = _decoded_steps(tree)
    digests = [hashlib.sha256() for _ in range(max((node.round for node in steps), default=0))]
    for node in steps:
        digests[node.round - 1].update(f"{step_line(node)}\n".encode())
    return [digest.hexdigest()[:_DIGITS] for digest in digests]


def first_differing_round(was: Sequence[str], now: Sequence[str]) -> int | None:
    """Return the number of the first round whose digests differ; None if all are equal.

    was, now: digests by `round_digests`. If one list is longer, its first extra round counts.
    """
    pairs = zip(was, now, strict=False)
    differing = [number for number, (one, other) in enumerate(pairs, 1) if one != other]
    if differing or len(was) != len(now):
        return differing[0] if differing else min(len(was), len(now)) + 1
    return None


def find_first_difference(was: SearchTree, now: SearchTree) -> TreeDifference | None:
    """Return the first difference between the decoded steps of two trees; None if equal."""
    trees = [
        {(node.round, node.lineage[1:]): node for node in _decoded_steps(tree)}
        for tree in (was, now)
    ]
    for number, lineage in sorted(trees[0].keys() | trees[1].keys()):
        one, other = (steps.get((number, lineage)) for steps in trees)
        if one is None or other is None:
            return TreeDifference("steps", number, lineage)
        if one.token_ids != other.token_ids:
            return TreeDifference("tokens", number, lineage, *_first_differing_token(one, other))
        if one.stop != other.stop:
            return TreeDifference("stop", number, lineage)
    return None


def _first_differing_token(one: Node, other: Node) -> tuple[int, int | None, int | None]:
    """Return the path position of the first differing token, and both token ids there.

    The id of a step that has already ended is None.
    """
    ids = one.token_ids, other.token_ids
    place = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), None)
    place = min(map(len, ids)) if place is None else place
    was, now = (tokens[place] if place < len(tokens) else None for tokens in ids)
    return one.start + place, was, now


def _decoded_steps(tree: SearchTree) -> list[Node]:
    """Return the decoded steps in lineage order, without the root and open nodes."""
    nodes = (node for node in tree.nodes() if node.parent is not None)
    return [node for node in nodes if node.state is not NodeState.OPEN]
