"""Which final candidate is the answer: best score, majority, or score-weighted vote.

Pure: votes, scores, and whose path is complete; no tree, no texts and no models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import get_args

from beamwright.search.rounds import TIE
from beamwright.sections import Choice

CHOICES: tuple[Choice, ...] = get_args(Choice)


def choose(
    votes: Sequence[str | None],
    scores: Sequence[float | None],
    complete: Sequence[bool],
    how: Choice,
) -> int:
    """Index of the chosen candidate; the sequences run over candidates in lineage order.

    votes: the same text for equal answers (`Node.vote`), None without one.
    `complete` says whose path ended by itself: a truncated path never wins against a complete
    one that has an answer. `best` takes the highest score. `majority` takes the most frequent
    answer, ties by summed score; `weighted` the answer with the largest summed score; either
    then returns the best-scored candidate with that answer. A tie that is left goes to the
    candidate that comes first.

    A missing score ranks last in `best` and weighs as much as any other missing one in a vote;
    so does one that is NaN or infinite.
    Negative scores are log-probabilities: in a vote they weigh exp(score).

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
    known = {i: score for i in indices if (score := scores[i]) is not None}
    return [*known][_first_largest([*known.values()])] if known else next(iter(indices))


def _first_largest(values: Sequence[float]) -> int:
    """Index of the first value that is within the tie distance of the largest."""
    largest = max(values)
    return next(i for i, value in enumerate(values) if value >= largest - TIE)


def _vote_weights(voters: Sequence[int], scores: Sequence[float | None]) -> dict[int, float]:
    """A vote's weight per voter, never negative."""
    known = [score for i in voters if (score := scores[i]) is not None]
    if not known:
        return dict.fromkeys(voters, 1.0)
    if min(known) >= 0:
        return {i: scores[i] or 0.0 for i in voters}
    # Shifting by the largest keeps exp() in range and every ratio as it was.
    largest = max(known)
    return {i: 0.0 if (score := scores[i]) is None else math.exp(score - largest) for i in voters}
