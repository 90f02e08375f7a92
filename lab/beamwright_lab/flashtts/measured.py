"""FlashTTS's baseline and this engine, measured here with the bundled generator and verifier.

The baseline is the frozen one (`flashtts.baseline`), its rules as options of this engine: half the
KV each, random order, 256 rows at most, recompute instead of a host tier, nothing decoded ahead,
and all steps decoded before any is scored. The verifier keeps its KV. What is no option is kinder
to it: no second process, prefixes shared to the token, KV that beams share read once.
"Strong" is this engine without P, M and S; "auto" is the default.

    python -m beamwright_lab.flashtts.measured --n 8 16 64

Memory is ample, or so much of what the search takes there (`--tight`). All trees have to be equal.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from beamwright import Solution, Solver
from beamwright.evaluate import Problem, load_problems
from beamwright_lab.common import Timing, finish, interleave, say, table
from beamwright_lab.flashtts.baseline import Rules

AMPLE = 2**30
RULES = Rules()
STRONG: Mapping[str, Any] = MappingProxyType(
    {
        "split": RULES.generator_share,
        "schedule": "prefix",
        "order": "random",
        "batching": "continuous",
        "speculation": "off",
    }
)
LOCALITY: Mapping[str, Any] = MappingProxyType(
    {"split": RULES.generator_share, "schedule": "locality", "speculation": "off"}
)
ARMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "baseline": {
            **STRONG,
            "evict": "recompute",
            "executor": "plain",
            "max_batch": RULES.max_running,
        },
        "strong": STRONG,
        "P": LOCALITY,
        "P+M": {"schedule": "locality", "speculation": "off"},
        "P+M+S": {"schedule": "locality", "speculation": "exact"},
        "auto": {},
    }
)
PROBLEMS: Mapping[int, int] = MappingProxyType({8: 4, 16: 4, 64: 3, 128: 2, 256: 1, 512: 1})
COLUMNS = (
    "n", "KV, KiB", "arm", "s, least", "s, median", "decoding, s", "scoring, s", "goodput, tok/s",
    "best", "over baseline", "best over best", "completion, s", "rows", "occupancy", "generated",
    "prefilled", "scored", "recomputed", "loaded, KiB", "kept of ahead", "equal",
)  # fmt: skip

Round = Sequence[Solution]


def measure(
    n: int, memory: int, arms: Sequence[str], problems: Sequence[Problem], rounds: int
) -> tuple[list[dict[str, Any]], int]:
    """A row per arm, in turns, and the most KV bytes that a search took under the first.

    Seconds are of all problems, one after the other.
    """
    solvers = {arm: Solver(n=n, kv_memory=memory, **ARMS[arm]) for arm in arms}
    found: dict[str, list[Round]] = {arm: [] for arm in arms}

    def run(arm: str) -> float:
        solutions = [solvers[arm].solve(each.problem) for each in problems]
        found[arm].append(solutions)
        return sum(each.time.total_s for each in solutions)

    for arm in arms:
        run(arm)  # warm
        found[arm].clear()
    timings = interleave({arm: partial(run, arm) for arm in arms}, rounds)
    for solver in solvers.values():
        solver.close()
    first = found[arms[0]]
    goodput, best = median(_goodput, first), max(map(_goodput, first))
    rows = [
        {
            "n": n,
            "KV, KiB": memory // 1024,
            "arm": arm,
            **figures(found[arm], timings[arm]),
            "over baseline": round(median(_goodput, found[arm]) / goodput, 2),
            "best over best": round(max(map(_goodput, found[arm])) / best, 2),
            "equal": _equal(found[arm], first),
        }
        for arm in arms
    ]
    return rows, max(solution.kv.device_peak_bytes for solution in first[0])


def figures(found: Sequence[Round], timing: Timing) -> dict[str, Any]:
    """What an arm came to: medians over rounds; counts are of one round.

    best: goodput of the best round, which a busy machine disturbs least.
    """
    tokens = [solution.tokens for solution in found[0]]
    batches = [solution.batch for solution in found[0]]
    ahead = sum(each.speculated for each in tokens)
    iterations = sum(each.iterations for each in batches)
    return {
        "s, least": round(timing.min_s, 3),
        "s, median": round(timing.median_s, 3),
        "rounds_s": [round(each, 4) for each in timing.rounds_s],
        "decoding, s": round(median(lambda r: sum(s.time.decode_s for s in r), found), 3),
        "scoring, s": round(median(lambda r: sum(s.time.verify_s for s in r), found), 3),
        "goodput, tok/s": round(median(_goodput, found), 1),
        "best": round(max(map(_goodput, found)), 1),
        "completion, s": round(median(_completion_s, found), 3),
        "rows": round(sum(b.iterations * (b.rows_mean or 0) for b in batches) / iterations, 1),
        "occupancy": round(statistics.fmean(b.occupancy or 0 for b in batches), 3),
        "generated": sum(each.generated for each in tokens),
        "prefilled": sum(each.generator_prefilled for each in tokens),
        "scored": sum(each.verifier_prefilled for each in tokens),
        "recomputed": sum(solution.kv.recomputed_tokens for solution in found[0]),
        "loaded, KiB": sum(solution.kv.h2d_bytes for solution in found[0]) // 1024,
        "preempted": sum(each.preempted for each in batches),
        "kept of ahead": f"{sum(t.speculated_kept for t in tokens)} of {ahead}" if ahead else None,
    }


def median(measure: Any, rounds: Sequence[Round]) -> float:
    return statistics.median(measure(each) for each in rounds)


def _completions(solutions: Round) -> tuple[float, float, int]:
    """Tokens and seconds of all final candidates of all problems, and their number."""
    tokens = sum(solution.tree_stats.path_tokens for solution in solutions)
    seconds = sum(
        solution.tree_stats.path_tokens / solution.goodput_tok_s
        for solution in solutions
        if solution.goodput_tok_s
    )
    return tokens, seconds, sum(len(solution.candidates) for solution in solutions)


def _goodput(solutions: Round) -> float:
    """Precise goodput (6.1): mean tokens of a candidate over its mean seconds."""
    tokens, seconds, _ = _completions(solutions)
    return tokens / seconds


def _completion_s(solutions: Round) -> float:
    """Mean seconds from a problem's start to a candidate's last score."""
    _, seconds, count = _completions(solutions)
    return seconds / count


def _equal(found: Sequence[Round], first: Sequence[Round]) -> str:
    same = [
        one.tree_hash == other.tree_hash
        for each in found
        for one, other in zip(each, first[0], strict=True)
    ]
    return f"{sum(same)} of {len(same)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=list(PROBLEMS))
    parser.add_argument("--arms", nargs="+", default=["baseline", "strong", "auto"], choices=ARMS)
    parser.add_argument("--tight", type=float, nargs="*", default=[0.5], help="shares of the peak")
    parser.add_argument("--problems", type=int, help="default: fewer for larger n")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for n in args.n:
        count = args.problems or PROBLEMS.get(n, 1)
        problems = load_problems("bundled:test", count).problems
        run = partial(measure, n, arms=args.arms, problems=problems, rounds=args.rounds)
        ample, peak = run(AMPLE)
        rows += ample
        for share in args.tight:
            rows += run(int(share * peak))[0]
        say(table(rows, COLUMNS))
    finish("flashtts_measured", {"rules": {a: dict(ARMS[a]) for a in args.arms}, "rows": rows})


if __name__ == "__main__":
    main()
