"""What selection may extend, said before all scores are in (FlashTTS section 4.1.1).

Scores of consecutive steps are correlated, so a step is as likely to be kept as the step before it
was good. `by_scores` looks at a step's own score where it is known, because steps are scored as
they end; `by_shares` likewise, for dynamic branching. Nothing is foreseen below `max_depth` (None:
there is no such depth).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from beamwright.protocols import Prospect
from beamwright.tree import Node, NodeState


def by_scores(beams: Sequence[Node], width: int, max_depth: int | None = None) -> list[Prospect]:
    """A prospect for every step of this round that is complete and can go on, the best first.

    First those that are scored and would be kept if the others' last scores were their scores;
    then those that are not scored, by their parents' scores; last those that are scored and would
    be kept if twice as many were. The others get nothing.
    """
    known = [_latest(beam) for beam in beams]

    def potential(beam: Node, rank: float) -> float:
        if beam.score is None:
            return rank
        return rank + 1 if rank > 1 - 1 / width else rank - 1

    return best_first(
        Prospect(beam, width, potential=potential(beam, rank))
        for beam, rank in zip(beams, ranks(known), strict=True)
        if can_go_on(beam, max_depth) and (beam.score is None or rank > 1 - 2 / width)
    )


FORESIGHTS = {"scores": by_scores}
"""By the value of `--foresight`; the lab adds FlashTTS's SelectSPEC, `bins`."""


def by_shares(
    beams: Sequence[Node],
    shares: Callable[[Sequence[float | None]], Sequence[int]],
    max_depth: int | None = None,
) -> list[Prospect]:
    """As many children as each would get if the others' last scores were their scores.

    shares: children by score, of paths that go on. Those that are scored come first.
    """
    going = [beam for beam in beams if not beam.ended]
    counts = shares([_latest(beam) for beam in going])
    most = max(counts, default=0)
    return best_first(
        Prospect(beam, count, potential=count + (most if beam.score is not None else 0))
        for beam, count in zip(going, counts, strict=True)
        if count and can_go_on(beam, max_depth)
    )


def certain(
    nodes: Sequence[Node], max_depth: int | None = None, *, greedy: bool = False
) -> list[Prospect]:
    """One child of every step that is complete and can go on: nothing competes with it."""
    return [Prospect(node, 1, greedy) for node in nodes if can_go_on(node, max_depth)]


def can_go_on(node: Node, max_depth: int | None = None) -> bool:
    """True if its step is complete, and the path ends neither with it nor at this level."""
    undecided = node.state is NodeState.CANDIDATE and not node.ended
    return undecided and (max_depth is None or node.depth < max_depth or node.level < max_depth)


def _latest(beam: Node) -> float | None:
    """Its score; of a step that is being written, the one before."""
    step = beam if beam.score is not None else beam.parent
    return None if step is None else step.score


def ranks(scores: Sequence[float | None]) -> list[float]:
    """The share of all scores that lie below each, from 0 to 1; half of those that equal it.

    Where all are equal, or none is known, each is the best. One that is not known is the worst.
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
    """In the order of their potential."""
    return sorted(prospects, key=lambda prospect: -prospect.potential)
