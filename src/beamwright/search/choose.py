"""Which final candidate is the answer: best score, majority, score-weighted vote, or a contest.

In a contest candidates, one for each answer, are compared by whoever can say which is right. It
says which of them are to be shown beside each other, and in which order; it is told how likely each
was found to be the right one, and ends with the winner. Votes come first: they seed it, and they
win where a comparison says nothing. Whoever reads lists prefers places in them, so every pair is
read in both orders, and a list in several. V1-Infer (2603.04304) plays pairs, GenSelect
(2602.02143) reads lists. Pure: places of candidates, answers, scores and shares; no tree, no texts
and no models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Literal

from beamwright.search.rounds import TIE

Choice = Literal["best", "majority", "weighted", "pairwise", "listwise"]
CHOICES: tuple[Choice, ...] = ("best", "majority", "weighted")
"""Those that answers and scores alone decide."""
SCORELESS: tuple[Choice, ...] = ("majority", "pairwise", "listwise")
"""Those that need no scores."""


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
    candidate that comes first. Before a comparison, and without one, the majority stands.

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
    if how in SCORELESS:
        most = max(len(ballot) for ballot in ballots)
        ballots = [ballot for ballot in ballots if len(ballot) == most]
    weights = _vote_weights(voters, scores)
    totals = [math.fsum(weights[i] for i in ballot) for ballot in ballots]
    return _best(ballots[_first_largest(totals)], scores)


def seeded(
    votes: Sequence[str | None], scores: Sequence[float | None], complete: Sequence[bool]
) -> list[int]:
    """One complete candidate for each answer, the majority's first; see `choose`."""
    seeds: list[int] = []
    left = [whole and vote is not None for vote, whole in zip(votes, complete, strict=True)]
    while any(left):
        seeds.append(choose(votes, scores, left, "majority"))
        left = [each and votes[i] != votes[seeds[-1]] for i, each in enumerate(left)]
    return seeds


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


# --- comparisons --------------------------------------------------------------------------------


MOST_LISTED = 8
"""Candidates of a list: each has its turn at every place, so tokens grow as the square of it."""

Shown = tuple[int, ...]
"""Candidates beside each other, in this order."""
Shares = Sequence[float] | None
"""How likely each of these is the right one, in their order; None: it could not be asked."""
Contest = Generator[list[Shown], Sequence[Shares], int]
"""Yields what is to be asked next, is sent an answer for each, and returns the chosen candidate."""


def pairwise(seeds: Sequence[int], budget: int | None) -> Contest:
    """A knockout: the first against the last, and so on; the first ones pass where some are left
    over. One comparison fewer than candidates, of two questions each.

    seeds: candidates, that with most votes first. budget: most comparisons: so many seeds and one
    more take part.
    """
    left = list(seeds if budget is None else seeds[: budget + 1])
    while len(left) > 1:
        half = len(left) // 2
        through = left[: len(left) - 2 * half]
        pairs = [*zip(left[len(through) : -half], reversed(left[-half:]), strict=True)]
        told = yield [shown for pair in pairs for shown in (pair, pair[::-1])]
        for pair, first, second in zip(pairs, told[::2], told[1::2], strict=True):
            gain = 0.0
            if first is not None and second is not None:
                gain = (first[1] + second[0] - first[0] - second[1]) / 2
            through.append(pair[gain > TIE])
        left = sorted(through, key=seeds.index)
    return left[0]


def listwise(seeds: Sequence[int], budget: int | None) -> Contest:
    """All beside each other, each first in turn; the largest mean share wins.

    A list that is too long loses its last seed. budget: most questions, whose first candidates are
    then evenly spread.
    """
    listed = tuple(seeds[:MOST_LISTED])
    while len(listed) > 1:
        turns = min(len(listed), budget or len(listed))
        firsts = [turn * len(listed) // turns for turn in range(turns)]
        shown = [listed[first:] + listed[:first] for first in firsts]
        told = yield shown
        if None not in told:
            means = mean_shares(zip(shown, told, strict=True))
            most = max(means.values())
            return next(each for each in listed if means[each] >= most - TIE)
        listed = listed[:-1]
    return listed[0]


def mean_shares(told: Iterable[tuple[Shown, Shares]]) -> dict[int, float]:
    """Each candidate's mean over the questions that it was part of."""
    found: dict[int, list[float]] = {}
    for shown, shares in told:
        for candidate, share in zip(shown, shares or (), strict=False):
            found.setdefault(candidate, []).append(share)
    return {candidate: sum(each) / len(each) for candidate, each in found.items()}


CONTESTS: Mapping[Choice, Callable[[Sequence[int], int | None], Contest]] = {
    "pairwise": pairwise,
    "listwise": listwise,
}
