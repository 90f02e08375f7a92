"""Numbers with the 95 % bootstrap interval over problems. Pure numpy; knows no records.

Problems are resampled with replacement, a fixed seed; percentile intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 10_000
_BOOTSTRAP_SEED = 0
_MEAN_RESAMPLES = 2_000
_CHUNK = 1_000_000  # drawn values held at once
_BOUNDS = (2.5, 97.5)  # percent

_Array = NDArray[np.float64]


class Estimate(TypedDict):
    """A number and its 95 % interval, [low, high]."""

    value: float
    interval: list[float]


def bootstrap_interval(num_correct: int, num_problems: int) -> list[float] | None:
    """95 % percentile bootstrap interval of the accuracy, [low, high]; fixed seed.

    Resampling zeros and ones with replacement is drawing from a binomial distribution.
    """
    if num_problems == 0:
        return None
    random = np.random.default_rng(_BOOTSTRAP_SEED)
    counts = random.binomial(num_problems, num_correct / num_problems, size=_RESAMPLES)
    low, high = np.percentile(counts / num_problems, _BOUNDS)
    return [float(low), float(high)]


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """The mean over problems; None without any."""
    return _estimate([(value,) for value in values], lambda drawn: drawn[..., 0].mean(axis=-1))


def estimate_percentile(values: Sequence[float], percent: int) -> Estimate | None:
    """A percentile over problems; None without any."""

    def percentile(drawn: _Array) -> _Array:
        return np.asarray(np.percentile(drawn[..., 0], percent, axis=-1))

    return _estimate([(value,) for value in values], percentile)


def estimate_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
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
) -> Estimate | None:
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
