"""Metrics of an evaluation (`eval --json`) from per-problem records, with 95 % intervals.

Goodput and completion time are defined in FlashTTS, section 6.1. Every choice (how a vote is
counted, which k) is fixed before an answer is seen. Shares have Wilson's interval. All other
numbers have a percentile bootstrap interval over problems, with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from statistics import NormalDist, fmean
from typing import Annotated, Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from beamwright.search.choose import CHOICES

_Value = TypeVar("_Value")
_BOOTSTRAP_SEED = 0
_MEAN_RESAMPLES = 2_000
_CHUNK = 1_000_000  # resampled values in memory at once
_INTERVAL = (2.5, 97.5)  # percent
_NORMAL = NormalDist().inv_cdf(0.975)

# Where a record holds each per-problem figure: (part of the record, key in it).
_PER_PROBLEM = {
    "tokens": ("tokens", "generated"),
    "seconds": ("time", "total_s"),
    "kv_device_peak_bytes": ("kv", "device_peak_bytes"),
    "kv_host_peak_bytes": ("kv", "host_peak_bytes"),
    "h2d_bytes": ("kv", "h2d_bytes"),
    "d2h_bytes": ("kv", "d2h_bytes"),
}

_Array = NDArray[np.float64]
_BOUNDS = Field(gt=-(2**63), lt=2**63)  # bounds of tokens, bytes and seconds
_Count = Annotated[int, _BOUNDS]
_Figure = Annotated[float, _BOUNDS]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Record:
    """The record of one problem, from which every metric can be computed again.

    correct: None if the file has no right answer; a problem with an `error` is wrong.
    choices: the answers that best, majority and weighted choice would give.
    num_correct: candidates that ended by themselves with the right answer; None if the file has no
        right answer.
    candidates: the final candidates without their long texts. With `--paths`, each has its `steps`
        as token ids and whether it is `correct`.
    prompt_ids: the prompt's token ids, with `--paths`.
    kv: the solution's KV figures in bytes.
    mean_path_tokens: mean tokens of the final candidates after the prompt.
    """

    unique_id: str
    index: Annotated[int, Field(ge=0)]
    problem: str
    gold: str | None
    level: str | int | bool | None
    answer: str | None = None
    correct: bool | None = None
    score: float | None = None
    stop: str | None = None
    rounds: int | None = None
    reason_fewer: str | None = None
    warnings: Sequence[str] = ()
    system_prompt: str | None = None
    error: str | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    prompt_ids: Sequence[_Count] = ()
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_correct: Annotated[int, Field(ge=0)] | None = None
    tokens: Mapping[str, _Count | None] = field(default_factory=dict)
    kv: Mapping[str, _Count | None] = field(default_factory=dict)
    time: Mapping[str, _Figure | None] = field(default_factory=dict)
    mean_path_tokens: _Figure | None = None
    goodput_tok_s: _Figure | None = None
    tree_hash: str | None = None
    exact: bool | None = None
    receipt: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check that values are possible, such as no more right candidates than candidates."""
        if (self.num_correct or 0) > len(self.candidates):
            raise ValueError(f"num_correct exceeds the {len(self.candidates)} candidates")
        verdicts = [vote.get("correct", 0) for vote in self.choices.values()]
        if not all(isinstance(verdict, bool | None) for verdict in verdicts):
            raise ValueError("choices: correct must be true, false or null")


class Estimated(TypedDict):
    """A value with its 95 % interval [low, high]."""

    value: float
    interval: list[float]


def summarise(records: Sequence[Record], num_candidates: int | None = None) -> dict[str, Any]:
    """Compute all metrics of `eval --json` from the records.

    Accuracies are over the problems with a known answer (`judged`), null if there are none.
    `tokens` and `time` are sums over problems, null if no problem has the figure. An estimate is an
    object with `value` and `interval`, the 95 % interval over problems: Wilson's for a share, a
    bootstrap interval otherwise.
    `latency_s` is a problem's own time, or its share of the batch if several were in flight.
    `completion_s` is from a problem's start to the end of a candidate, the mean of its candidates.
    `goodput_tok_s` is the mean tokens of all final candidates over their mean seconds, which is not
    the mean of the problems' goodputs. `per_problem`: means; a peak is the engine's while the
    problem was in flight. `warnings` counts the problems that have one, and quotes the first.

    num_candidates: the requested n; None: the maximum number of candidates of a problem.
    """
    accuracy = estimate_share(verdicts := _known(record.correct for record in records))
    # A problem with an error has no candidates, so it is wrong under every choice.
    top1 = {
        how: estimate_share(
            _known(r.choices.get(how, {"correct": r.correct})["correct"] for r in records)
        )
        for how in CHOICES
    }
    rounds = _known(record.rounds for record in records)
    per_problem = {
        name: _known(getattr(record, part).get(key) for record in records)
        for name, (part, key) in _PER_PROBLEM.items()
    }
    warned = [record.warnings for record in records if record.warnings]
    return {
        "problems": len(records),
        "judged": len(verdicts),
        "correct": sum(verdicts),
        "accuracy": accuracy and accuracy["value"],
        "accuracy_interval": accuracy and accuracy["interval"],
        "by_choice": {how: share and share["value"] for how, share in top1.items()},
        "top1": top1,
        "pass_at": _pass_at(records, num_candidates),
        "by_level": _by_level(records),
        "errors": sum(record.error is not None for record in records),
        "warnings": {"problems": len(warned), "example": warned[0][0] if warned else None},
        "system_prompt": next((r.system_prompt for r in records if r.system_prompt), None),
        "fewer_candidates": sum(record.reason_fewer is not None for record in records),
        "mean_rounds": fmean(rounds) if rounds else None,
        "tokens": _sums(record.tokens for record in records),
        "time": _sums(record.time for record in records),
        **_goodput(records),
        "latency_s": _percentiles(per_problem["seconds"]),
        "per_problem": {name: estimate_mean(found) for name, found in per_problem.items()},
    }


def _goodput(records: Sequence[Record]) -> dict[str, Any]:
    paths = [  # mean tokens and seconds of a problem's candidates, and their number
        (record.mean_path_tokens, record.mean_path_tokens / record.goodput_tok_s, record.candidates)
        for record in records
        if record.goodput_tok_s and record.mean_path_tokens
    ]
    sums = [(tokens * len(found), seconds * len(found)) for tokens, seconds, found in paths]
    goodput = _estimate(sums, lambda drawn: drawn[..., 0].sum(axis=1) / drawn[..., 1].sum(axis=1))
    return {
        "goodput_tok_s": goodput and goodput["value"],
        "precise_goodput_tok_s": goodput,
        "completion_s": _percentiles([seconds for _, seconds, _ in paths]),
    }


def _pass_at(records: Sequence[Record], num_candidates: int | None) -> dict[str, Estimated | None]:
    """Return pass@k for k = 1, 2, 4, ..., n.

    The estimate is unbiased for independent samples. For candidates of a tree, which share steps,
    it says how many of them are worth returning, not what a smaller search would find. Candidates
    that are missing, because a search ended with fewer, count as wrong.
    """
    n = max([num_candidates or 0, *(len(record.candidates) for record in records)])
    known = [(len(r.candidates), c) for r in records if (c := r.num_correct) is not None]
    steps = [2**power for power in range(n.bit_length()) if 2**power < n]
    return {
        str(k): estimate_share([pass_at_k(max(n, total), right, k) for total, right in known])
        for k in [*steps, *([n] if n else [])]
    }


def pass_at_k(num_candidates: int, num_correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the chance that k of n candidates include a right one."""
    # Integers until the last division, so it is exact for any n.
    all_wrong = math.comb(num_candidates - num_correct, k)
    total = math.comb(num_candidates, k)
    return (total - all_wrong) / total


def _by_level(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[bool | None]] = {}
    for record in records:
        if record.level is not None:
            groups.setdefault(str(record.level), []).append(record.correct)
    summary = {}
    # Numbers in numeric order ("10" after "9"), then words.
    for level in sorted(groups, key=lambda name: (not name.isdigit(), len(name), name)):
        accuracy = estimate_share(verdicts := _known(groups[level]))
        summary[level] = {
            "problems": len(groups[level]),
            "correct": sum(verdicts),
            "accuracy": accuracy and accuracy["value"],
            "interval": accuracy and accuracy["interval"],
        }
    return summary


def _known(values: Iterable[_Value | None]) -> list[_Value]:
    return [value for value in values if value is not None]


def _sums(groups: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    totals: dict[str, float | None] = {}
    for group in groups:
        for name, value in group.items():
            total = totals.get(name)
            totals[name] = total if value is None else (total or 0) + value
    return totals


# --- numbers with intervals --------------------------------------------------------------------


def wilson_interval(share: float, num_problems: int) -> list[float]:
    """Return the 95 % Wilson score interval [low, high] of a share of the problems.

    The interval holds even if all or none are right, and for few problems (Brown, Cai and DasGupta
    2001). For a mean of values between 0 and 1 it is conservative, because 0 and 1 vary most.
    """
    z2 = _NORMAL**2
    middle = (share + z2 / (2 * num_problems)) / (1 + z2 / num_problems)
    spread = share * (1 - share) / num_problems + z2 / (4 * num_problems**2)
    half = _NORMAL / (1 + z2 / num_problems) * math.sqrt(spread)
    low = 0.0 if share == 0 else max(0.0, middle - half)
    return [low, 1.0 if share == 1 else min(1.0, middle + half)]


def estimate_share(values: Sequence[float]) -> Estimated | None:
    """Return the mean of values in [0, 1] with its interval; None without values."""
    if not values:
        return None
    share = sum(values) / len(values)
    return {"value": share, "interval": wilson_interval(share, len(values))}


def estimate_mean(values: Sequence[float]) -> Estimated | None:
    """Return the mean over problems with its interval; None without values."""
    return _estimate(values, lambda drawn: drawn.mean(axis=1))


def _percentiles(values: Sequence[float]) -> dict[str, Estimated | None]:
    return {
        f"p{share}": _estimate(values, partial(np.percentile, q=share, axis=1))
        for share in (50, 95)
    }


def _estimate(
    rows: Sequence[float] | Sequence[tuple[float, ...]], statistic: Callable[[_Array], Any]
) -> Estimated | None:
    """Return a statistic over problems with its bootstrap interval; None without problems.

    rows: values per problem. statistic: reduces resampled rows [resamples, problems, ...] over
        problems.
    """
    if not rows:
        return None
    values = np.asarray(rows, dtype=np.float64)
    random = np.random.default_rng(_BOOTSTRAP_SEED)
    size = max(1, _CHUNK // values.size)
    drawn = [
        statistic(values[random.integers(0, len(values), (count, len(values)))])
        for count in (min(size, _MEAN_RESAMPLES - i) for i in range(0, _MEAN_RESAMPLES, size))
    ]
    low, high = np.percentile(np.concatenate(drawn), _INTERVAL)
    return {"value": float(statistic(values[None])[0]), "interval": [float(low), float(high)]}
