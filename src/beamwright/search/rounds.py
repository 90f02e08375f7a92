"""Functions that several strategies share: open a round, rank candidates, distribute children.

A finished candidate keeps one of the n places, and a round gives out only the remaining places. A
search therefore ends with exactly n candidates. search-and-learn instead fills every round up to n
and ends with more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from beamwright.protocols import Action, EndSearch, Extend, FinishPath, Prune
from beamwright.sections import SearchSettings
from beamwright.tree import Node, SearchTree


@dataclass(frozen=True)
class Round:
    """Result of `open_round`: actions that are already decided, and the nodes left to decide."""

    actions: list[Action]
    # Candidates that can be extended, in lineage order. Empty if `actions` already decide the whole
    # round, because the search begins or ends.
    going: Sequence[Node] = ()
    slots: int = 0  # number of children to distribute among `going`


def open_round(
    tree: SearchTree, settings: SearchSettings, level: int | None = None, apart: int | None = None
) -> Round:
    """Decide the actions that are the same in most strategies, at the beginning of `select`.

    The first round gives the root n children. A later round finishes ended candidates, prunes
    duplicates if `filter_duplicates` is set, and ends the search if no place is left, if no
    candidate can be extended, or at `max_rounds`.

    level: the level of the candidates, compared with `max_rounds`; None: the number of rounds.
    apart: number of the root's children in each subtree (DVTS), to find duplicates; None: one tree.
    """
    if tree.rounds == 0:
        return Round([Extend(tree.root, settings.n)])
    candidates = tree.candidates()
    dropped = find_duplicates(candidates, apart) if settings.filter_duplicates else []
    ended = [node for node in candidates if node.ended and node not in dropped]
    going = [node for node in candidates if not node.ended and node not in dropped]
    actions: list[Action] = [*map(Prune, dropped), *map(FinishPath, ended)]
    slots = settings.n - len(tree.finished()) - len(ended)
    if slots <= 0:
        return Round([*actions, *map(Prune, going), EndSearch()])
    if not going:
        why = "were duplicates" if dropped else "had ended before they branched"
        return Round([*actions, EndSearch(f"{slots} of {settings.n} paths {why}")])
    if (tree.rounds if level is None else level) >= settings.max_rounds:
        return Round([*actions, EndSearch(f"{slots} of {settings.n} paths reached --max-rounds")])
    return Round(actions, going, slots)


def give_children(nodes: Sequence[Node], shares: Sequence[int]) -> list[Action]:
    """Extend each node by its number of children in `shares`; prune a node whose share is 0."""
    return [
        Extend(node, share) if share else Prune(node)
        for node, share in zip(nodes, shares, strict=True)
    ]


TIE = 1e-6  # scores that differ by less are equal, and the lineage decides their order
_TIE_DECIMALS = 6


def rank_key(node: Node) -> tuple[float, tuple[str | int, ...]]:
    """Return the sort key of `node`: best score first, then lineage order.

    A node without a score comes last.
    """
    score = float("-inf") if node.score is None else round(node.score, _TIE_DECIMALS)
    return (-score, node.lineage[1:])


def sort_by_rank(nodes: Iterable[Node]) -> list[Node]:
    """Sort nodes by score, the best first.

    Ties are sorted by lineage, so that the order never depends on the schedule.
    """
    return sorted(nodes, key=rank_key)


ranked = sort_by_rank  # the old name, for one release


def subtree_of(node: Node, apart: int | None) -> int:
    """Return the number of the subtree (DVTS) that contains `node`.

    apart: number of the root's children in each subtree; None: there is one subtree, number 0.
    """
    ordinal = node.lineage[1] if apart else 0
    assert isinstance(ordinal, int)
    return ordinal // (apart or 1)


def find_duplicates(nodes: Iterable[Node], apart: int | None = None) -> list[Node]:
    """Return the nodes whose path has the same text as the path of an earlier node in `nodes`.

    Without a tokenizer no text is known, and the token ids of the paths are compared.

    apart: number of the root's children in each subtree, if subtrees do not compete. Nodes of
        different subtrees are then never duplicates.
    """
    seen: set[tuple[int, str | tuple[int, ...]]] = set()
    repeated: list[Node] = []
    for node in nodes:
        key = subtree_of(node, apart), node.text or tuple(node.path_token_ids())
        if key in seen:
            repeated.append(node)
        seen.add(key)
    return repeated


Branching = Literal["softmax", "linear"]


def score_weights(
    scores: Sequence[float | None], branching: Branching, temperature: float
) -> list[float]:
    """Convert scores to weights for resampling or branching: none is negative, not all are 0.

    branching: "softmax" weighs exp(score / temperature), as in REBASE and particle filtering.
        "linear" weighs the score itself; if a score is negative, all scores are log-probabilities
        and weigh exp(score).

    A missing score has weight 0. If all weights would be 0, all are equal instead.
    """
    # Rounding makes scores within 1e-6 equal: their last bits must not decide who gets a child.
    scores = [None if s is None or math.isnan(s) else round(s, 6) for s in scores]
    known = [score for score in scores if score is not None]
    if not known:
        return [1.0] * len(scores)
    largest = max(known)

    def weight(score: float | None) -> float:
        if score is None:
            return 0.0
        if branching == "softmax":
            return math.exp((score - largest) / temperature)
        return score if min(known) >= 0 else math.exp(score - largest)

    weights = [weight(score) for score in scores]
    return weights if sum(weights) > 0 else [1.0] * len(scores)


def even_shares(total: int, count: int) -> list[int]:
    """Divide `total` into `count` integer shares that differ by at most one, the larger first."""
    share, extra = divmod(total, count)
    return [share + (place < extra) for place in range(count)]


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` into integer shares in proportion to `weights`; their sum is `total`.

    Each share is first rounded down. What is left of `total` goes to the largest remainders, one
    each. Remainders within 1e-9 are equal, and the first of them wins.
    """
    whole = math.fsum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [math.floor(each + 1e-9) for each in exact]
    left = total - sum(shares)
    order = sorted(range(len(weights)), key=lambda i: (-round(exact[i] - shares[i], 9), i))
    for i in order[:left]:
        shares[i] += 1
    return shares


def systematic_resample(weights: Sequence[float], total: int, offset: float) -> list[int]:
    """Draw `total` indices by systematic resampling, and return how often each was drawn.

    offset: a uniform random number in [0, 1). Draw j takes the first index at which the cumulated,
        normalised weights exceed (j + offset) / total.

    Each count is the expected number of draws, rounded up or down.
    """
    bounds = [*accumulate(weights)]
    shares, place = [0] * len(weights), 0
    for draw in range(total):
        at = (draw + offset) / total * bounds[-1]
        while place < len(bounds) - 1 and bounds[place] <= at:
            place += 1
        shares[place] += 1
    return shares


def effective_sample_size(weights: Sequence[float]) -> float:
    """Return the effective sample size (sum w)^2 / sum w^2, from 1 to the number of weights."""
    return math.fsum(weights) ** 2 / math.fsum(weight * weight for weight in weights)
