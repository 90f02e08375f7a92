"""Choose the answer among the final candidates: best score, majority, or score-weighted vote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import get_args

from beamwright.search.rounds import TIE
from beamwright.sections import AnswerChoice

CHOICES: tuple[AnswerChoice, ...] = get_args(AnswerChoice)


def choose(
    votes: Sequence[str | None],
    scores: Sequence[float | None],
    complete: Sequence[bool],
    how: AnswerChoice,
) -> int:
    """Return the index of the chosen candidate. The sequences are in lineage order.

    votes: one text per candidate, the same for equal answers (`Node.vote`); None without an answer.
    scores: the path scores. A missing, NaN or infinite score ranks last in `best`. In a vote it
        weighs nothing; if all scores are missing, all votes weigh the same. Negative scores are
        log-probabilities and weigh exp(score).
    complete: True for a path that ended by itself. A truncated path never wins against a complete
        path that has an answer.
    how: `best` takes the highest score. `majority` takes the most frequent answer, and breaks ties
        by the summed score. `weighted` takes the answer with the largest summed score. Both votes
        return the best-scored candidate with the winning answer.

    The first candidate wins any tie that remains.

    Raises:
        ValueError: if there are no candidates.
    """
    if not votes:
        raise ValueError("there are no candidates to choose from")
    scores = [score if score is not None and math.isfinite(score) else None for score in scores]
    voters = [i for i, vote in enumerate(votes) if complete[i] and vote is not None]
    if not voters:
        finished = [i for i in range(len(votes)) if complete[i]]
        return _best(finished or range(len(votes)), scores)
    if how == "best":
        return _best(voters, scores)
    groups: dict[str, list[int]] = {}
    for i in voters:
        groups.setdefault(votes[i] or "", []).append(i)
    ballots = list(groups.values())
    if how == "majority":
        most = max(len(ballot) for ballot in ballots)
        ballots = [ballot for ballot in ballots if len(ballot) == most]
    weights = _vote_weights(voters, scores)
    totals = [math.fsum(weights[i] for i in ballot) for ballot in ballots]
    return _best(ballots[_first_largest(totals)], scores)


def _best(indices: Iterable[int], scores: Sequence[float | None]) -> int:
    """Return the index with the highest score; the first index if no score is known."""
    known = {i: score for i in indices if (score := scores[i]) is not None}
    return [*known][_first_largest([*known.values()])] if known else next(iter(indices))


def _first_largest(values: Sequence[float]) -> int:
    """Return the index of the first value that lies within TIE of the largest value."""
    largest = max(values)
    return next(i for i, value in enumerate(values) if value >= largest - TIE)


def _vote_weights(voters: Sequence[int], scores: Sequence[float | None]) -> dict[int, float]:
    """Return the weight of each voter's vote, by the voter's index; no weight is negative."""
    known = [score for i in voters if (score := scores[i]) is not None]
    if not known:
        return dict.fromkeys(voters, 1.0)
    if min(known) >= 0:
        return {i: scores[i] or 0.0 for i in voters}
    # Subtracting the largest score keeps exp() in range and does not change the ratios.
    largest = max(known)
    return {i: 0.0 if (score := scores[i]) is None else math.exp(score - largest) for i in voters}
