"""Numbers with their 95 % interval over problems. Pure numpy; knows no records.

Shares have Wilson's. For everything else problems are resampled with replacement, a fixed seed:
percentile bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

_BOOTSTRAP_SEED = 0
_MEAN_RESAMPLES = 2_000
_CHUNK = 1_000_000  # drawn values held at once
_BOUNDS = (2.5, 97.5)  # percent
_NORMAL = NormalDist().inv_cdf(0.975)

_Array = NDArray[np.float64]


class Estimated(TypedDict):
    """A number and its 95 % interval, [low, high]."""

    value: float
    interval: list[float]


def wilson_interval(share: float, num_problems: int) -> list[float] | None:
    """95 % Wilson score interval of a share of the problems, [low, high]; None without any.

    Sound where all or none are right, and for few problems (Brown, Cai and DasGupta 2001). For a
    mean of values between 0 and 1 it is on the safe side: none varies more than a yes or no.
    """
    if num_problems == 0:
        return None
    z2 = _NORMAL**2
    middle = (share + z2 / (2 * num_problems)) / (1 + z2 / num_problems)
    spread = share * (1 - share) / num_problems + z2 / (4 * num_problems**2)
    half = _NORMAL / (1 + z2 / num_problems) * math.sqrt(spread)
    low = 0.0 if share == 0 else max(0.0, middle - half)
    return [low, 1.0 if share == 1 else min(1.0, middle + half)]


def estimate_share(values: Sequence[float]) -> Estimated | None:
    """The mean of values between 0 and 1 over problems; None without any."""
    if not values:
        return None
    share = sum(values) / len(values)
    interval = wilson_interval(share, len(values))
    assert interval is not None
    return {"value": share, "interval": interval}


def estimate_mean(values: Sequence[float]) -> Estimated | None:
    """The mean over problems; None without any."""
    return _estimate([(value,) for value in values], lambda drawn: drawn[..., 0].mean(axis=-1))


def estimate_percentile(values: Sequence[float], percent: int) -> Estimated | None:
    """A percentile over problems; None without any."""

    def percentile(drawn: _Array) -> _Array:
        return np.asarray(np.percentile(drawn[..., 0], percent, axis=-1))

    return _estimate([(value,) for value in values], percentile)


def estimate_ratio(pairs: Sequence[tuple[float, float]]) -> Estimated | None:
    """Sum of the first over sum of the second, which must be positive; None without any."""

    def ratio(drawn: _Array) -> _Array:
        sums = drawn.sum(axis=-2)
        return np.asarray(sums[..., 0] / sums[..., 1])

    return _estimate(pairs, ratio)


def pass_at_k(num_candidates: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n candidates hold one of the c right ones.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_candidates and 1 <= k <= num_candidates):
        raise ValueError(f"no pass@{k} of {num_correct} right among {num_candidates} candidates")
    # Whole numbers until the last division: exact at any n.
    all_wrong = math.comb(num_candidates - num_correct, k)
    total = math.comb(num_candidates, k)
    return (total - all_wrong) / total


def _estimate(
    rows: Sequence[tuple[float, ...]], statistic: Callable[[_Array], _Array]
) -> Estimated | None:
    """statistic: reduces [..., problems, columns] to [...]."""
    if not rows:
        return None
    values = np.asarray(rows, dtype=np.float64)
    random = np.random.default_rng(_BOOTSTRAP_SEED)
    size = max(1, _CHUNK // values.size)
    drawn = [
        statistic(values[random.integers(0, len(values), (count, len(values)))])
        for count in _parts(_MEAN_RESAMPLES, size)
    ]
    low, high = np.percentile(np.concatenate(drawn), _BOUNDS)
    return {"value": float(statistic(values)), "interval": [float(low), float(high)]}


def _parts(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
