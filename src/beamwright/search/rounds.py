"""What strategies have in common: a round's candidates, their ranking, and sharing out children.

Finished candidates keep their place: a round extends n minus the finished, so that a search ends
with exactly n candidates. search-and-learn replicates to n and overshoots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.sections import SearchSettings
from beamwright.tree import Node, SearchTree


@dataclass(frozen=True)
class Round:
    """A round's candidates.

    actions: what is decided already. going: those that can go on, in lineage order; none where all
    is decided: the search begins, or has ended. slots: children to give out among them.
    """

    actions: list[Action]
    going: Sequence[Node] = ()
    slots: int = 0


def open_round(
    tree: SearchTree, settings: SearchSettings, level: int | None = None, apart: int | None = None
) -> Round:
    """Begin with n paths; later set finished candidates aside, drop duplicates if asked to, and
    see if the search is over.

    level: steps of the candidates, where that is not the number of rounds. apart: see `duplicates`.
    """
    if tree.rounds == 0:
        return Round([Extend(tree.root, settings.n)])
    candidates = tree.candidates()
    dropped = duplicates(candidates, apart) if settings.filter_duplicates else []
    ended = [node for node in candidates if node.ended and node not in dropped]
    going = [node for node in candidates if not node.ended and node not in dropped]
    actions: list[Action] = [*map(Prune, dropped), *map(Complete, ended)]
    slots = settings.n - len(tree.finished()) - len(ended)
    if slots <= 0:
        return Round([*actions, *map(Prune, going), Finish()])
    if not going:
        why = "were duplicates" if dropped else "had ended before they branched"
        return Round([*actions, Finish(f"{slots} of {settings.n} paths {why}")])
    if (tree.rounds if level is None else level) >= settings.max_rounds:
        return Round([*actions, Finish(f"{slots} of {settings.n} paths reached --max-rounds")])
    return Round(actions, going, slots)


def give_children(nodes: Sequence[Node], shares: Sequence[int]) -> list[Action]:
    """So many children for each; who gets none is pruned."""
    return [
        Extend(node, share) if share else Prune(node)
        for node, share in zip(nodes, shares, strict=True)
    ]


TIE = 1e-6  # scores this close are equal; order (lineage) decides
_TIE_DECIMALS = 6


def rank_key(node: Node) -> tuple[float, tuple[str | int, ...]]:
    """Sort key, best first. A node without a score comes last."""
    score = float("-inf") if node.score is None else round(node.score, _TIE_DECIMALS)
    return (-score, node.lineage[1:])


def ranked(nodes: Iterable[Node]) -> list[Node]:
    """Best score first; ties by lineage, so that the order never depends on the schedule."""
    return sorted(nodes, key=rank_key)


def subtree_of(node: Node, apart: int | None) -> int:
    """Its number, where so many children of the root share one; 0 for all otherwise."""
    ordinal = node.lineage[1] if apart else 0
    assert isinstance(ordinal, int)
    return ordinal // (apart or 1)


def duplicates(nodes: Iterable[Node], apart: int | None = None) -> list[Node]:
    """Nodes whose path has the same text as an earlier one's (in the order given).

    Without a tokenizer there is no text, and tokens count. apart: children of the root in a
    subtree, where subtrees do not compete: each has duplicates of its own.
    """
    seen: set[tuple[int, str | tuple[int, ...]]] = set()
    found: list[Node] = []
    for node in nodes:
        key = subtree_of(node, apart), node.text or tuple(node.path_token_ids())
        if key in seen:
            found.append(node)
        seen.add(key)
    return found


Branching = Literal["softmax", "linear"]


def weights_of(
    scores: Sequence[float | None], branching: Branching, temperature: float
) -> list[float]:
    """A weight of each score, none negative, not all zero.

    softmax: exp(score / temperature), as REBASE and particle filtering have it. linear: the score
    itself; scores below zero are log-probabilities, and weigh exp(score). A missing score weighs
    nothing; if nothing weighs anything, all weigh the same.
    """
    # Scores within 1e-6 are equal: their last bits must not decide who gets a child.
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
    """Whole shares of `total` for so many, as even as can be; the first get one more."""
    share, extra = divmod(total, count)
    return [share + (place < extra) for place in range(count)]


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Whole shares of `total` in proportion to the weights; they add up to it.

    What rounding down leaves goes to the largest remainders, ties (1e-9) to who comes first.
    """
    whole = math.fsum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [math.floor(each + 1e-9) for each in exact]
    left = total - sum(shares)
    order = sorted(range(len(weights)), key=lambda i: (-round(exact[i] - shares[i], 9), i))
    for i in order[:left]:
        shares[i] += 1
    return shares


def systematic(weights: Sequence[float], total: int, offset: float) -> list[int]:
    """How often each is drawn by systematic resampling of `total`.

    offset: a uniform draw in [0, 1). Draw j falls where the cumulated weights pass
    (j + offset) / total; each share is its expectation, rounded up or down.
    """
    bounds = [*accumulate(weights)]
    shares, place = [0] * len(weights), 0
    for draw in range(total):
        at = (draw + offset) / total * bounds[-1]
        while place < len(bounds) - 1 and bounds[place] <= at:
            place += 1
        shares[place] += 1
    return shares


def effective_size(weights: Sequence[float]) -> float:
    """Effective sample size: (sum w)^2 / sum w^2, from 1 to the number of weights."""
    return math.fsum(weights) ** 2 / math.fsum(weight * weight for weight in weights)
