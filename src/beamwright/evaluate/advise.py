"""Advice for `eval --advise`: search, choose by score, or vote?

The advice compares two runs over the same problems, one of samples and one of a search. It computes
the accuracy of votes and choices over k samples, at the tokens and at the seconds that the search
took, with paired intervals of the lead over the vote. It also measures the verifier: the useful
width grows like exp((gap / noise)^2) (arXiv 2603.15377), where gap is the difference between the
mean scores of right and wrong paths. This module reads records and knows no solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.evaluate.metrics import Record, estimate_mean, estimate_share
from beamwright.search import DEFAULT_SEARCH, strategy_entry
from beamwright.search.choose import choose
from beamwright.sections import MOST_CANDIDATES
from beamwright.tree import COMPLETE_STOPS

Way = Literal["majority", "weighted", "best"]
MOST_PROBLEMS = 50
_CALLED: dict[Way, str] = {"majority": "vote", "weighted": "weighted vote", "best": "best of n"}
_SAMPLES = 2  # the sampling run draws this many samples per candidate of the search
_SURE = 1.0  # a method is recommended if it leads the vote by this many standard errors


def trial_settings(settings: Settings) -> dict[str, Settings]:
    """Return the settings of the runs: `samples`, and `search` if a verifier scores steps.

    The search is the requested one if its paths compete for places, else beam search.

    Raises:
        InputError: if there are too many candidates.
    """
    n = settings.search.n
    if _SAMPLES * n > MOST_CANDIDATES:
        raise InputError(
            f"--advise: {_SAMPLES} times --n {n} exceeds {MOST_CANDIDATES} candidates; lower --n"
        )
    if settings.model.verifier_or_default == "none":
        vote = {"search": "majority", "choose": "majority"}
        return {"samples": settings.changed(**vote, n=_SAMPLES * n)}
    name = settings.search.search or DEFAULT_SEARCH
    decides = settings.search.search is None or strategy_entry(settings.search).competes
    samples = {"search": "best-of-n", "n": _SAMPLES * n, "choose": "best"}
    return {
        "samples": settings.changed(**samples),
        "search": settings.changed(search=name if decides else DEFAULT_SEARCH),
    }


@dataclass(frozen=True)
class _Path:
    """One sample: its vote, its score, whether it ended by itself, and whether it was right."""

    vote: str | None
    score: float | None
    complete: bool
    right: bool


@dataclass(frozen=True)
class _Pool:
    """The samples of one problem, with their mean cost.

    tokens, seconds: per sample, without scoring. scored_s: seconds per sample, with scoring.
    """

    paths: Sequence[_Path]
    tokens: float
    seconds: float
    scored_s: float

    def right(self, k: int, how: Way) -> float:
        """Return the accuracy of a choice among k samples, averaged over disjoint groups of k."""
        starts = range(0, max(1, len(self.paths) - k + 1), k)
        groups = [self.paths[start : start + k] for start in starts]
        return fmean(_chosen(group, how) for group in groups if group) if self.paths else 0.0


def _chosen(paths: Sequence[_Path], how: Way) -> bool:
    votes, scores = [p.vote for p in paths], [p.score for p in paths]
    return paths[choose(votes, scores, [p.complete for p in paths], how)].right


# Function that returns, for each answer of a record, whether the answer is right; None: unknown.
Judge = Callable[[Record], Mapping[str | None, bool | None]]


def _pool(record: Record, verdicts: Mapping[str | None, bool | None]) -> _Pool:
    paths = [
        _Path(each["vote"], each["score"], each["stop"] in COMPLETE_STOPS, right)
        for each in record.candidates
        for right in [bool(verdicts.get(each["answer"]))]
    ]
    count, total_s = max(1, len(paths)), record.time.get("total_s") or 0.0
    drawn_s = total_s - (record.time.get("verify_s") or 0.0)
    tokens = record.tokens.get("generated") or 0
    return _Pool(paths, tokens / count, drawn_s / count, total_s / count)


def make_advice(
    samples: Sequence[Record], search: Sequence[Record], name: str, judge: Judge
) -> dict[str, Any]:
    """Return the object that `eval --advise --json` prints.

    samples, search: records of the same problems in the same order; `search` may be empty.
    name: the name of the search.
    """
    pools = [_pool(record, judge(record)) for record in samples]
    most = max(len(pool.paths) for pool in pools)
    one = {"accuracy": estimate_share([pool.right(1, "majority") for pool in pools])}
    noise = verifier_noise(pools)
    if not search:
        vote = estimate_share([pool.right(most, "majority") for pool in pools])
        gained = [pool.right(most, "majority") - pool.right(1, "majority") for pool in pools]
        found = {"one": one, "vote": {"k": most, "accuracy": vote}, "noise": None}
        return {**found, "say": _without_scores(most, gained)}
    costs = {
        "tokens": [float(r.tokens.get("generated") or 0) for r in search],
        "seconds": [(r.time.get("total_s") or 0.0) for r in search],
    }
    at = {unit: _compared(unit, fmean(costs[unit]), pools, search, name, most) for unit in costs}
    return {"one": one, "noise": noise, **at, "say": _sentence(at["tokens"], at["seconds"], noise)}


def _compared(
    unit: str, budget: float, pools: Sequence[_Pool], search: Sequence[Record], name: str, most: int
) -> dict[str, Any]:
    """Compare vote, best score and search at the search's mean cost.

    unit: "tokens" or "seconds". budget: the search's mean cost per problem, in that unit.
    """

    def affordable(how: Way) -> int:
        each = {"tokens": "tokens", "seconds": "seconds" if how == "majority" else "scored_s"}
        cost = fmean(getattr(pool, each[unit]) for pool in pools)
        return min(most, max(1, round(budget / cost))) if cost else most

    scored = any(path.score is not None for pool in pools for path in pool.paths)
    hows = {how: called for how, called in _CALLED.items() if scored or how == "majority"}
    widths = {called: affordable(how) for how, called in hows.items()}
    right = {
        called: [pool.right(widths[called], how) for pool in pools] for how, called in hows.items()
    }
    right[name] = [float(bool(record.correct)) for record in search]
    ways = {
        way: {
            "k": widths.get(way),
            "accuracy": estimate_share(values),
            "ahead": estimate_mean(ahead),
            "error": _standard_error(ahead),
        }
        for way, values in right.items()
        for ahead in [[a - b for a, b in zip(values, right["vote"], strict=True)]]
    }
    return {"each": budget, "ways": ways}


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf


def verifier_noise(pools: Sequence[_Pool]) -> dict[str, float] | None:
    """Measure how well scores separate right from wrong paths of the same problem.

    Returns None if no problem has both kinds. gap: difference of the mean scores. noise: standard
    deviation around these means. ranked: share of pairs of a right and a wrong path in which the
    right path has the higher score; a tie counts half. width: the largest useful width.
    """
    gaps, around, ranked = list[float](), list[float](), list[float]()
    for pool in pools:
        of = {
            right: [p.score for p in pool.paths if p.score is not None and p.right is right]
            for right in (True, False)
        }
        if not (of[True] and of[False]):
            continue
        gaps.append(fmean(of[True]) - fmean(of[False]))
        for scores in of.values():
            around += [(score - fmean(scores)) ** 2 for score in scores] if len(scores) > 1 else []
        pairs = [(a, b) for a in of[True] for b in of[False]]
        ranked.append(fmean((a > b) + (a == b) / 2 for a, b in pairs))
    if not gaps:
        return None
    gap, noise = fmean(gaps), math.sqrt(fmean(around)) if around else 0.0
    ratio = max(0.0, gap) / noise if noise else 30.0 * (gap > 0)
    width = min(float(MOST_CANDIDATES), math.exp(min(ratio, 10.0) ** 2))
    return {"gap": gap, "noise": noise, "ranked": fmean(ranked), "width": width}


# --- the recommendation ------------------------------------------------------------------------


def _without_scores(k: int, gained: Sequence[float]) -> str:
    points = 100 * fmean(gained)
    if points <= _SURE * 100 * _standard_error(gained):
        return f"One sample: a vote of {k} is not measurably better here ({points:+.1f} points)."
    return f"Vote: {k} samples are {points:+.1f} points ahead of one; no verifier scores steps."


def _sentence(
    tokens: Mapping[str, Any], seconds: Mapping[str, Any], noise: Mapping[str, float] | None
) -> str:
    """Return the recommendation as one sentence."""
    ways = tokens["ways"]
    lead = max(ways, key=lambda way: ways[way]["ahead"]["value"])
    ahead, vote = ways[lead]["ahead"], f"vote of {ways['vote']['k']}"
    sharp = "" if noise is None else f"; scores rank {noise['ranked']:.0%} of pairs correctly"
    if lead == "vote" or ahead["value"] <= _SURE * ways[lead]["error"]:
        return f"Do not search, use a {vote}: nothing is measurably better at equal tokens{sharp}."
    low, high = (100 * bound for bound in ahead["interval"])
    k = ways[lead]["k"]
    same = seconds["ways"][lead]["ahead"]["value"] > 0
    return (
        f"Use {lead if k is None else f'{lead}, n = {k}'}: {100 * ahead['value']:+.1f} points "
        f"over a {vote} at equal tokens (95 %: {low:+.1f} to {high:+.1f})"
        f"{'' if same else ', though not at equal seconds'}{sharp}."
    )
