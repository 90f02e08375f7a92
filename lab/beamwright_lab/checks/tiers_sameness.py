"""Does the tree depend on tiers and budgets? Equal hashes with in-gpu are required.

1. A pairwise covering array of schedule, budget, prefetch, balance, inter-beam, planner, attention,
   eviction and its victims, on a few problems. Recompute runs in float64, the rest in float32.
2. Four configurations on many problems.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.evaluate import Problem, load_problems
from beamwright.solver.own import IGNORED
from beamwright_lab.checks.covering import Row, covering_array
from beamwright_lab.common import finish, say, table

FACTORS: dict[str, list[Any]] = {
    "schedule": ["locality", "layerwise"],
    "budget": ["all", "half", "quarter", "minimum"],
    "prefetch": [True, False],
    "balance": [True, False],
    "inter_beam": [True, False],
    "planner": ["ranges", "greedy"],
    "attention": ["tree", "dense"],
    "evict": ["host", "recompute"],
    "victims": ["tree", "lru", "cost"],
}
SHARES = {"all": 1.0, "half": 0.5, "quarter": 0.25, "minimum": 0.0}
PLAIN = {"prefetch": True, "balance": True, "inter_beam": True, "planner": "ranges"}
FOUR: list[Row] = [
    {**PLAIN, "schedule": "locality", "budget": "half", "attention": "tree", "evict": "host"},
    {**PLAIN, "schedule": "locality", "budget": "minimum", "attention": "tree", "evict": "host"},
    {**PLAIN, "schedule": "locality", "budget": "quarter", "attention": "dense", "evict": "host"},
    {**PLAIN, "schedule": "layerwise", "budget": "half", "attention": "tree", "evict": "host"},
]
COLUMNS = [*FACTORS, "equal", "trees", "raised", "h2d_mib", "d2h_mib", "seconds"]


class Compared:
    """Runs of the same problems, with in-gpu as the reference of each attention and dtype."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._base = {
            "model": args.model,
            "verifier": args.verifier,
            "n": args.n,
            "width": args.width,
            "seed": args.seed,
            "host_memory": args.host_memory,
        }
        self.reference = cache(self._reference)

    def _reference(self, attention: str, dtype: str, schedule: str, text: str, key: str) -> Any:
        """Tree hash and peak bytes with everything resident."""
        options = {"attention": attention, "dtype": dtype, "schedule": schedule}
        with self._solver(tuple(options.items())) as solver:
            solution = solver.solve(text, problem_id=key)
        return solution.tree_hash, solution.kv.device_peak_bytes

    def _solver(self, options: Iterable[tuple[str, Any]]) -> Solver:
        found = {**self._base, **dict(options)}
        ignored = IGNORED.get(found["schedule"], ())
        return Solver(**{name: value for name, value in found.items() if name not in ignored})

    def run(self, row: Row, problems: Sequence[Problem]) -> dict[str, Any]:
        """One configuration on these problems. raised: budgets that had to grow to the least."""
        dtype = "float64" if row["evict"] == "recompute" else "float32"
        start, equal, raised = time.perf_counter(), 0, 0
        h2d = d2h = 0
        different: list[str] = []
        for problem in problems:
            where = (row["attention"], dtype)
            asked = (problem.problem, problem.unique_id)
            expected, peak = self.reference(*where, "in-gpu", *asked)
            if row["schedule"] == "layerwise":
                _, peak = self.reference(*where, "layerwise", *asked)
            solution, grown = self._solve(row, dtype, peak, problem)
            raised += grown
            equal += solution.tree_hash == expected
            if solution.tree_hash != expected:
                different.append(problem.unique_id)
            h2d, d2h = h2d + solution.kv.h2d_bytes, d2h + solution.kv.d2h_bytes
        return {
            **row,
            "equal": equal,
            "trees": len(problems),
            "different": different,
            "raised": raised,
            "h2d_mib": round(h2d / 2**20, 2),
            "d2h_mib": round(d2h / 2**20, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }

    def _solve(
        self, row: Row, dtype: str, peak_bytes: int, problem: Problem
    ) -> tuple[Solution, bool]:
        """A budget that is too small grows by a twentieth of the peak until it suffices."""
        options = {name: value for name, value in row.items() if name != "budget"}
        share, grown = SHARES[row["budget"]], False
        budget = max(int(share * peak_bytes), peak_bytes // 20)
        while True:
            settings = {**options, "dtype": dtype, "kv_memory": budget}
            with self._solver(settings.items()) as solver:
                try:
                    return solver.solve(problem.problem, problem_id=problem.unique_id), grown
                except CapacityError:
                    if budget >= 4 * peak_bytes:
                        raise
                    budget, grown = budget + max(1, peak_bytes // 20), True


def compare(compared: Compared, rows: Sequence[Row], problems: Sequence[Problem]) -> list[Any]:
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(compared.run(row, problems))
        except (BeamwrightError, AssertionError) as error:
            found.append({**row, "equal": 0, "trees": len(problems), "error": str(error)})
            say(f"  failed: {row}: {error}")
        say(f"  {number}/{len(rows)}: {found[-1]['equal']} of {found[-1]['trees']} equal")
    say(table(found, COLUMNS))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Is the tree the same on two tiers?")
    parser.add_argument("--limit", type=int, default=50, help="problems of the four configurations")
    parser.add_argument("--array-limit", type=int, default=5, help="problems of the array")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    problems = load_problems("bundled:test", max(args.limit, args.array_limit)).problems
    compared = Compared(args)
    array = compare(
        compared, covering_array(FACTORS), problems[: min(args.array_limit, args.limit)]
    )
    four = compare(compared, FOUR, problems[: args.limit])
    ok = all(found["equal"] == found["trees"] for found in [*array, *four])
    result = {"n": args.n, "width": args.width, "covering_array": array, "four": four, "ok": ok}
    finish("tiers_sameness", result)


if __name__ == "__main__":
    main()
