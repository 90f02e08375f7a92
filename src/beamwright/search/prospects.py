"""Predict which steps selection will extend, before the round is over (for speculation).

The children of these steps can be decoded ahead (FlashTTS section 4.1.1). Scores of consecutive
steps are correlated, so the parent's score predicts a step's score until the step has its own. In
all functions, a path that has `max_depth` steps gets no prospect; None: no limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from beamwright.protocols import Prospect
from beamwright.tree import Node, NodeState


def predict_by_scores(
    beams: Sequence[Node], width: int, max_depth: int | None = None
) -> list[Prospect]:
    """Predict that the best-scored steps of this round are extended; return the likeliest first.

    A step is ranked by its own score, or by its parent's score until it has one. Selection keeps
    the share 1 / width of the steps. The order is:

    1. scored steps whose rank lies within this share,
    2. steps without a score, by rank,
    3. scored steps whose rank lies within twice this share.

    Other scored steps get no prospect.
    """
    known = [_latest_score(beam) for beam in beams]

    def potential(beam: Node, rank: float) -> float:
        if beam.score is None:
            return rank
        return rank + 1 if rank > 1 - 1 / width else rank - 1

    return best_first(
        Prospect(beam, width, potential=potential(beam, rank))
        for beam, rank in zip(beams, ranks(known), strict=True)
        if can_be_extended(beam, max_depth) and (beam.score is None or rank > 1 - 2 / width)
    )


# Prediction functions by the value of `--foresight`. The lab adds `bins` (SelectSPEC).
FORESIGHTS = {"scores": predict_by_scores}


def predict_by_shares(
    beams: Sequence[Node],
    shares: Callable[[Sequence[float | None]], Sequence[int]],
    max_depth: int | None = None,
) -> list[Prospect]:
    """Predict that each beam gets the children that it would get by the scores so far.

    A beam without a score is judged by its parent's score. Scored beams come first.

    shares: returns the numbers of children for the scores of all unfinished beams.
    """
    going = [beam for beam in beams if not beam.ended]
    counts = shares([_latest_score(beam) for beam in going])
    most = max(counts, default=0)
    return best_first(
        Prospect(beam, count, potential=count + (most if beam.score is not None else 0))
        for beam, count in zip(going, counts, strict=True)
        if count and can_be_extended(beam, max_depth)
    )


def predict_certain(
    nodes: Sequence[Node], max_depth: int | None = None, *, greedy: bool = False
) -> list[Prospect]:
    """Predict one child for every complete step of an unfinished path.

    This is for strategies such as best-of-n, whose selection extends all these steps.
    """
    return [Prospect(node, 1, greedy) for node in nodes if can_be_extended(node, max_depth)]


def can_be_extended(node: Node, max_depth: int | None = None) -> bool:
    """Return True if the step of `node` is complete and waits for selection, and may get a child.

    A step gets no child if its path has ended or has `max_depth` steps.
    """
    undecided = node.state is NodeState.CANDIDATE and not node.ended
    return undecided and (max_depth is None or node.depth < max_depth or node.level < max_depth)


def _latest_score(beam: Node) -> float | None:
    """Return the score of `beam`; if it has none yet, the score of its parent."""
    step = beam if beam.score is not None else beam.parent
    return None if step is None else step.score


def ranks(scores: Sequence[float | None]) -> list[float]:
    """Return the percentile rank of each score, from 0 to 1: the share of known scores below it.

    Equal scores, the score itself included, count half. An unknown score has rank 0. If all known
    scores are equal, or none is known, every rank is 1.
    """
    known = sorted(score for score in scores if score is not None)

    def rank(score: float | None) -> float:
        if not known or known[0] == known[-1]:
            return 1.0
        if score is None:
            return 0.0
        return (bisect_left(known, score) + bisect_right(known, score)) / 2 / len(known)

    return [rank(score) for score in scores]


def best_first(prospects: Iterable[Prospect]) -> list[Prospect]:
    """Sort prospects by their potential, the largest first."""
    return sorted(prospects, key=lambda prospect: -prospect.potential)
