"""Sharing out children among nodes by weight. Pure arithmetic; knows no trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

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

    found = [weight(score) for score in scores]
    return found if sum(found) > 0 else [1.0] * len(scores)


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
