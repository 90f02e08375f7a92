"""From records to the numbers of `eval --json`. Pure; knows no files and no solver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from beamwright.evaluate.record import Record
from beamwright.search.choose import CHOICES

_RESAMPLES = 10_000
_BOOTSTRAP_SEED = 0


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Every metric over the records, in the vocabulary of `eval --json`.

    Accuracies are over the problems whose right answer is known (`judged`), null if there are
    none. `tokens` and `time` are sums over problems, null where no problem has the figure.
    """
    verdicts = _verdicts(record.correct for record in records)
    rounds = [record.rounds for record in records if record.rounds is not None]
    return {
        "problems": len(records),
        "judged": len(verdicts),
        "correct": sum(verdicts),
        "accuracy": _mean(verdicts),
        "accuracy_interval": bootstrap_interval(sum(verdicts), len(verdicts)),
        "by_choice": {how: _mean(_choice_verdicts(records, how)) for how in CHOICES},
        "by_level": _by_level(records),
        "errors": sum(record.error is not None for record in records),
        "fewer_candidates": sum(record.reason_fewer is not None for record in records),
        "mean_rounds": _mean(rounds),
        "tokens": _sums(record.tokens for record in records),
        "time": _sums(record.time for record in records),
        "goodput_tok_s": goodput(records),
    }


def bootstrap_interval(num_correct: int, num_problems: int) -> list[float] | None:
    """95 % percentile bootstrap interval of the accuracy, [low, high]; fixed seed.

    Resampling zeros and ones with replacement is drawing from a binomial distribution.
    """
    if num_problems == 0:
        return None
    random = np.random.default_rng(_BOOTSTRAP_SEED)
    counts = random.binomial(num_problems, num_correct / num_problems, size=_RESAMPLES)
    low, high = np.percentile(counts / num_problems, [2.5, 97.5])
    return [float(low), float(high)]


def goodput(records: Iterable[Record]) -> float | None:
    """Goodput over the final candidates of all problems, tokens per second.

    A problem's goodput is mean path tokens / mean seconds of its candidates; over all problems
    it is the mean tokens over the mean seconds again, every candidate counted once, which is
    not the mean of the problems' goodputs.
    """
    tokens = seconds = 0.0
    for record in records:
        if record.goodput_tok_s and record.mean_path_tokens is not None:
            path_tokens = record.mean_path_tokens * len(record.candidates)
            tokens += path_tokens
            seconds += path_tokens / record.goodput_tok_s
    return tokens / seconds if seconds else None


def _verdicts(values: Iterable[bool | None]) -> list[bool]:
    return [value for value in values if value is not None]


def _choice_verdicts(records: Sequence[Record], how: str) -> list[bool]:
    # A problem with an error has no candidates: wrong, whoever chooses.
    return _verdicts(
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
        verdicts = _verdicts(groups[level])
        summary[level] = {
            "problems": len(groups[level]),
            "correct": sum(verdicts),
            "accuracy": _mean(verdicts),
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
