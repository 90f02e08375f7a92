"""Contests: final candidates, one for each answer, compared by whoever can say which is right.

A contest says which candidates are to be shown beside each other, and in which order; it is told
how likely each was found to be the right one, and ends with the winner. Votes come first: they seed
it, and they win where a comparison says nothing. Whoever reads lists prefers places in them, so
every pair is read in both orders, and a list in several. Pure: places of candidates and shares; no
texts, no models. V1-Infer (2603.04304) plays pairs, GenSelect (2602.02143) reads lists.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from beamwright.search.choose import Choice
from beamwright.search.rounds import TIE

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
