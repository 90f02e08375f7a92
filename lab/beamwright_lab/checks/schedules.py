"""Checks that trees do not depend on scheduling options or on other problems in flight.

The rows are a pairwise covering array over slots, batching, KV budget, problems in flight,
exploration mode, executor, speculation, scoring of speculative steps, memory split and order of
beams. Each row runs the next problems in turn, so that together they run all. The trees must equal
those of each problem alone with all KV on the device and the plain executor. Runs use float64, in
which a row's result does not depend on its batch even on machines where float32's does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import beamwright_lab.flashtts.order  # noqa: F401 (declares a schedule)
from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.schedule import SCHEDULES
from beamwright_lab.checks.covering import Row, covering_array
from beamwright_lab.common import finish, say, table

FACTORS: dict[str, list[Any]] = {
    "slots": [1, 8, None],
    "batching": ["grouped", "continuous"],
    "budget": ["in-gpu", "half", "quarter", "least"],
    "in_flight": [1, 16],
    "explore": ["lockstep", "continuous", "decoupled"],
    "executor": ["plain", "overlapped", "auto"],
    "speculation": ["off", "exact", "auto"],
    "verify_ahead": ["slack", "never"],
    "split": ["auto", "0.2", "0.8"],
    "schedule": ["locality", "prefix"],
}
SHARES = {"in-gpu": 1.0, "half": 0.5, "quarter": 0.25, "least": 0.0}
COLUMNS = [*FACTORS, "equal", "trees", "kv_kib", "raised", "ahead", "h2d_mib", "d2h_mib", "seconds"]
Outcomes = Mapping[str, Solution | BeamwrightError]


class Compared:
    """Comparison of rows of options with each problem solved alone."""

    def __init__(self, options: Mapping[str, Any], problems: Sequence[Problem]) -> None:
        self._options, self._problems = options, problems
        self.alone = self._together({"executor": "plain", "speculation": "off"}, problems, 1)
        self._peaks = {1: _peak_bytes(self.alone)}
        self._first = 0

    def run(self, row: Row, per_row: int) -> dict[str, Any]:
        """Run one row of options on the next problems, and return its line of the table."""
        start, turn = time.perf_counter(), range(self._first, self._first + per_row)
        problems = [self._problems[place % len(self._problems)] for place in turn]
        self._first += per_row
        options = {
            "max_batch": row["slots"],
            "batching": row["batching"],
            "explore": row["explore"],
            "executor": row["executor"],
            "speculation": row["speculation"],
            "verify_ahead": row["verify_ahead"],
            "split": row["split"],
        }
        found, budget, raised = self._within(row, options, problems)
        solved = [each for each in found.values() if isinstance(each, Solution)]
        different = [key for key, each in found.items() if _hash(each) != _hash(self.alone[key])]
        return {
            **row,
            "equal": len(problems) - len(different),
            "trees": len(problems),
            "different": different,
            "kv_kib": None if budget is None else budget // 1024,
            "raised": raised,
            "ahead": sum(each.tokens.speculated for each in solved),
            # Each solution reports the link's bytes of all problems in flight.
            "h2d_mib": round(max(each.kv.h2d_bytes for each in solved) / 2**20, 2),
            "d2h_mib": round(max(each.kv.d2h_bytes for each in solved) / 2**20, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }

    def _within(
        self, row: Row, options: Mapping[str, Any], problems: Sequence[Problem]
    ) -> tuple[Outcomes, int | None, int]:
        """Return the outcomes, the budget in bytes, and how many problems needed more.

        Searches that do not fit run again with a larger budget until they do.
        """
        in_flight = row["in_flight"]
        if row["budget"] == "in-gpu":
            options = {**options, "schedule": "in-gpu"}
            return self._together(options, problems, in_flight), None, 0
        step = self._peaks[1] // 20
        budget = first = max(int(SHARES[row["budget"]] * self._peak(in_flight)), step)
        found: dict[str, Solution | BeamwrightError] = {}
        left, raised = list(problems), 0
        while left:
            tight = {**options, "schedule": row["schedule"], "kv_memory": budget}
            now = self._together(tight, left, in_flight)
            found |= now
            wants = {k: each for k, each in now.items() if isinstance(each, CapacityError)}
            left = [each for each in left if each.unique_id in wants]
            raised += len(left) if budget == first else 0
            budget += step
        return found, first, raised

    def _peak(self, in_flight: int) -> int:
        if in_flight not in self._peaks:
            many = self._problems[: 2 * in_flight]
            self._peaks[in_flight] = _peak_bytes(self._together({}, many, in_flight))
        return self._peaks[in_flight]

    def _together(
        self, options: Mapping[str, Any], problems: Sequence[Problem], in_flight: int
    ) -> Outcomes:
        found = {"schedule": "in-gpu", **self._options, **options}
        ignored = SCHEDULES[found["schedule"]].unused_options
        settings = {name: value for name, value in found.items() if name not in ignored}
        pairs = [(each.unique_id, each.problem) for each in problems]
        with Solver(**settings) as solver:
            return {str(key): each for key, each in solver.solve_many(pairs, in_flight=in_flight)}


def _peak_bytes(found: Outcomes) -> int:
    return max(each.kv.device_peak_bytes for each in found.values() if isinstance(each, Solution))


def _hash(found: Solution | BeamwrightError) -> str:
    return found.tree_hash if isinstance(found, Solution) else f"{type(found).__name__}: {found}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--problems", type=int, default=100, help="of bundled:test")
    parser.add_argument("--per-row", type=int, default=100, help="problems of each row")
    parser.add_argument("--search", default="beam")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--max-rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    names = ("model", "verifier", "search", "n", "width", "max_rounds", "dtype", "host_memory")
    problems = load_problems("bundled:test", args.problems).problems
    compared = Compared({name: getattr(args, name) for name in names}, problems)
    say(f"  {len(compared.alone)} problems alone")
    rows, found = covering_array(FACTORS), []
    for number, row in enumerate(rows, start=1):
        found.append(compared.run(row, min(args.per_row, len(problems))))
        say(f"  {number}/{len(rows)}: {found[-1]}")
    say(table(found, COLUMNS))
    ok = all(each["equal"] == each["trees"] for each in found)
    finish("schedules", {"n": args.n, "width": args.width, "rows": found, "ok": ok})


if __name__ == "__main__":
    main()
