"""From records to the numbers of `eval --json`, with 95 % intervals over problems. No solver.

FlashTTS section 6.1 for goodput and completion time. Nothing here is fitted to the problems: every
choice (how a vote is counted, which k) is fixed before an answer is seen. Shares have Wilson's
interval. For everything else problems are resampled with replacement, a fixed seed: percentile
bootstrap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamwright.evaluate.results import Record
from beamwright.search.choose import CHOICES

_Value = TypeVar("_Value")
_DIGITS = re.compile(r"[-+.e\d]*\d")
_BOOTSTRAP_SEED = 0
_MEAN_RESAMPLES = 2_000
_CHUNK = 1_000_000  # drawn values held at once
_BOUNDS = (2.5, 97.5)  # percent
_NORMAL = NormalDist().inv_cdf(0.975)

_Array = NDArray[np.float64]


def summarise(records: Sequence[Record], num_candidates: int | None = None) -> dict[str, Any]:
    """Every metric over the records, in the vocabulary of `eval --json`.

    Accuracies are over the problems whose right answer is known (`judged`), null if there are
    none. `tokens` and `time` are sums over problems, null where no problem has the figure. An
    estimate is an object of `value` and `interval`, the 95 % interval over problems: Wilson's for
    a share, the bootstrap's for anything else.
    `latency_s` is a problem's own time, its share of the batch where several were in flight;
    `completion_s` is from a problem's start to the end of a candidate, the mean of its candidates.

    `warnings` counts the problems that have one, and quotes the kind that most have.

    num_candidates: the n that was asked for; None takes the most that a problem has.
    """
    verdicts = _known(record.correct for record in records)
    rounds = [record.rounds for record in records if record.rounds is not None]
    return {
        "problems": len(records),
        "judged": len(verdicts),
        "correct": sum(verdicts),
        "accuracy": _mean(verdicts),
        "accuracy_interval": _interval(verdicts),
        "by_choice": {how: _mean(_choice_verdicts(records, how)) for how in CHOICES},
        "top1": {how: estimate_share(_choice_verdicts(records, how)) for how in CHOICES},
        "pass_at": _pass_at(records, num_candidates),
        "by_level": _by_level(records),
        "errors": sum(record.error is not None for record in records),
        "warnings": _warnings(records),
        "system_prompt": next((r.system_prompt for r in records if r.system_prompt), None),
        "fewer_candidates": sum(record.reason_fewer is not None for record in records),
        "mean_rounds": _mean(rounds),
        "tokens": _sums(record.tokens for record in records),
        "time": _sums(record.time for record in records),
        "goodput_tok_s": goodput(records),
        "precise_goodput_tok_s": estimate_ratio(_paths(records)),
        "latency_s": _percentiles(_known(record.time.get("total_s") for record in records)),
        "completion_s": _percentiles(
            [s / len(r.candidates) for r in records for _, s in _paths([r])]
        ),
        "per_problem": _per_problem(records),
    }


def _warnings(records: Sequence[Record]) -> dict[str, Any]:
    """Problems with a warning, and the first of the kind that most have.

    Warnings that differ in numbers alone are of one kind.
    """
    kinds: dict[str, list[str]] = {}
    for line in (line for record in records for line in record.warnings):
        kinds.setdefault(_DIGITS.sub("", line), []).append(line)
    most = max(kinds.values(), key=len, default=None)
    example = None if most is None else most[0]
    return {"problems": sum(bool(record.warnings) for record in records), "example": example}


def goodput(records: Iterable[Record]) -> float | None:
    """Goodput over the final candidates of all problems, tokens per second.

    A problem's goodput is mean path tokens / mean seconds of its candidates; over all problems
    it is the mean tokens over the mean seconds again, every candidate counted once, which is
    not the mean of the problems' goodputs.
    """
    paths = _paths(records)
    seconds = sum(each for _, each in paths)
    return sum(each for each, _ in paths) / seconds if seconds else None


def _paths(records: Iterable[Record]) -> list[tuple[float, float]]:
    """Tokens and seconds of each problem, summed over its final candidates."""
    found = []
    for record in records:
        if record.goodput_tok_s and record.mean_path_tokens:
            tokens = record.mean_path_tokens * len(record.candidates)
            found.append((tokens, tokens / record.goodput_tok_s))
    return found


def _percentiles(values: Sequence[float]) -> dict[str, Estimated | None]:
    return {f"p{share}": estimate_percentile(values, share) for share in (50, 95)}


def _pass_at(records: Sequence[Record], num_candidates: int | None) -> dict[str, Estimated | None]:
    """Per k = 1, 2, 4, ..., n: the chance that k candidates at random hold a right one.

    Unbiased for independent samples. A tree's candidates share steps: there it says how many of
    these candidates are worth returning, not what a smaller search would find. A candidate that
    is missing, because a search ended with fewer, counts as a wrong one.
    """
    n = max([num_candidates or 0, *(len(record.candidates) for record in records)])
    known = [(len(r.candidates), c) for r in records if (c := r.num_correct) is not None]
    steps = [2**power for power in range(n.bit_length()) if 2**power < n]
    return {
        str(k): estimate_share([pass_at_k(max(n, total), right, k) for total, right in known])
        for k in [*steps, *([n] if n else [])]
    }


def _per_problem(records: Sequence[Record]) -> dict[str, Estimated | None]:
    """Means over problems; a peak is the engine's while the problem was in flight."""
    figures: dict[str, Callable[[Record], float | None]] = {
        "tokens": lambda record: record.tokens.get("generated"),
        "seconds": lambda record: record.time.get("total_s"),
    }
    estimates = {name: estimate_mean(_known(map(get, records))) for name, get in figures.items()}
    for name in ("device_peak_bytes", "host_peak_bytes", "h2d_bytes", "d2h_bytes"):
        shown = f"kv_{name}" if "peak" in name else name
        estimates[shown] = estimate_mean(_known(record.kv.get(name) for record in records))
    return estimates


def _known(values: Iterable[_Value | None]) -> list[_Value]:
    return [value for value in values if value is not None]


def _interval(verdicts: Sequence[bool]) -> list[float] | None:
    return wilson_interval(sum(verdicts) / len(verdicts), len(verdicts)) if verdicts else None


def _choice_verdicts(records: Sequence[Record], how: str) -> list[bool]:
    # A problem with an error has no candidates: wrong, whoever chooses.
    return _known(
        record.choices[how]["correct"] if how in record.choices else record.correct
        for record in records
    )


def _by_level(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[bool | None]] = {}
    for record in records:
        if record.level is not None:
            groups.setdefault(str(record.level), []).append(record.correct)
    summary = {}
    # Numbers in numeric order ("10" after "9"), then words.
    for level in sorted(groups, key=lambda name: (not name.isdigit(), len(name), name)):
        verdicts = _known(groups[level])
        summary[level] = {
            "problems": len(groups[level]),
            "correct": sum(verdicts),
            "accuracy": _mean(verdicts),
            "interval": _interval(verdicts),
        }
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sums(groups: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    totals: dict[str, float | None] = {}
    for group in groups:
        for name, value in group.items():
            total = totals.get(name)
            totals[name] = total if value is None else (total or 0) + value
    return totals


# --- numbers with intervals --------------------------------------------------------------------


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

    return _estimate(
        [(value,) for value in values],
        lambda drawn: np.asarray(np.percentile(drawn[..., 0], percent, axis=-1)),
    )


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
        for count in (min(size, _MEAN_RESAMPLES - i) for i in range(0, _MEAN_RESAMPLES, size))
    ]
    low, high = np.percentile(np.concatenate(drawn), _BOUNDS)
    return {"value": float(statistic(values)), "interval": [float(low), float(high)]}
