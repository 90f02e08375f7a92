"""Does the tree depend on how problems are run beside each other? Equal hashes are required.

A pairwise covering array of slots, batching, KV budget, problems in flight, how they share the
device, executor, speculation, whether its steps are scored ahead, the split of KV between generator
and verifier, and the order of beams. Each row takes its share of the problems in
turn, so that the rows together run all of them. Compared with every problem alone, all KV on the
device, plain executor. Float64: a row's bits do not depend on who is beside it where the machine's
products do.

`--random N`: the command line instead, N times, with random options that go together (`solve` and
`eval`, mostly with `--schedule auto`, KV from too little to more than enough). Counts option sets
that ran, that were refused, that had too little KV, tracebacks, and trees that are not those of the
same search alone with room though the run says that they are (`exact`). `--first` goes on from a
set that was printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import beamwright_lab.flashtts.order  # noqa: F401 (declares a schedule)
from beamwright import Solution, Solver
from beamwright.cli.app import main as beamwright
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.solver.request import IGNORED
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
    """Rows against what every problem finds alone."""

    def __init__(self, options: Mapping[str, Any], problems: Sequence[Problem]) -> None:
        self._options, self._problems = options, problems
        self.alone = self._together({"executor": "plain", "speculation": "off"}, problems, 1)
        self._peaks = {1: _peak_bytes(self.alone)}
        self._first = 0

    def run(self, row: Row, per_row: int) -> dict[str, Any]:
        """One row, on the next problems."""
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
            # Figures of the link are of all that were in flight together.
            "h2d_mib": round(max(each.kv.h2d_bytes for each in solved) / 2**20, 2),
            "d2h_mib": round(max(each.kv.d2h_bytes for each in solved) / 2**20, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }

    def _within(
        self, row: Row, options: Mapping[str, Any], problems: Sequence[Problem]
    ) -> tuple[Outcomes, int | None, int]:
        """Outcomes, the budget, and how many problems needed more: a search that does not fit is
        tried again with what it says that it needs, until it does.
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
        ignored = IGNORED.get(found["schedule"], ())
        settings = {name: value for name, value in found.items() if name not in ignored}
        pairs = [(each.unique_id, each.problem) for each in problems]
        with Solver(**settings) as solver:
            return {str(key): each for key, each in solver.solve_many(pairs, in_flight=in_flight)}


def _peak_bytes(found: Outcomes) -> int:
    return max(each.kv.device_peak_bytes for each in found.values() if isinstance(each, Solution))


def _hash(found: Solution | BeamwrightError) -> str:
    return found.tree_hash if isinstance(found, Solution) else f"{type(found).__name__}: {found}"


# --- random options --------------------------------------------------------------------------

DECIDE: dict[str, list[Any]] = {
    "search": ["beam", "beam", "dvts", "best-of-n", "dynamic", "lookahead", "particles"],
    "n": [4, 8],
    "width": [2, 4],
    "max-rounds": [3, 6],
    "seed": [0, 61],
}
FREE: dict[str, list[Any]] = {
    "schedule": [None, None, None, None, "locality", "layerwise"],
    "kv-memory": ["300KiB", "600KiB", "1MiB", "1500KiB", "2MiB", "4MiB", "6MiB", "16MiB", None],
    "executor": ["plain", "overlapped", None, None],
    "speculation": ["off", "exact", "auto", None],
    "verify-ahead": ["never", None],
    "explore": ["lockstep", "continuous", "decoupled", None],
    "batching": ["grouped", "continuous", None, None],
    "split": ["auto", "0.4", None, None],
    "write-back": ["eager", "lazy", None, None],
    "max-batch": [1, 3, None, None, None],
    "evict": ["recompute", None, None, None],
    "attention": ["dense", "reference", None, None, None],
}
RECIPE: dict[str, list[Any]] = {
    "planner": ["greedy", None, None, None],
}
"""What recipes say and command lines do not, of the schedule."""
_NUM_PROBLEMS = 3


def random_sets(count: int, first: int, seed: int) -> dict[str, Any]:
    """Sets `first` to `count` - 1, one by one; each has a random stream of its own."""
    counts: Counter[str] = Counter()
    bad: list[dict[str, Any]] = []
    problems = load_problems("bundled:test", _NUM_PROBLEMS).problems
    for number in range(first, count):
        found: dict[str, Any] = {}
        for attempt in range(100):  # until options go together
            words, decide = _drawn(random.Random(f"{seed} {number} {attempt}"), problems)
            found = {"set": number, "words": " ".join(words), **_run_once(words, decide, problems)}
            counts[found["outcome"]] += 1
            if found["outcome"] != "refused":
                break
        if found["outcome"] not in ("equal", "capacity", "inexact"):
            bad.append(found)
            say(f"  BAD {found}")
        say(f"  {number + 1}/{count} {found['outcome']}: {found['words']}")
    ran = sum(counts.values()) - counts["refused"]
    return {"seed": seed, "sets": ran, "counts": dict(counts), "bad": bad, "ok": not bad}


def _drawn(draw: random.Random, problems: Sequence[Problem]) -> tuple[list[str], dict[str, Any]]:
    """A command's words, and what decides its trees."""
    decide = {name: draw.choice(values) for name, values in DECIDE.items()}
    free = {name: draw.choice(values) for name, values in FREE.items()}
    words = ["eval", "bundled:test", "--limit", str(_NUM_PROBLEMS), "--in-flight"]
    words.append(draw.choice(["1", "2", "3", "auto"]))
    if draw.random() < 0.5:
        words = ["solve", problems[draw.randrange(_NUM_PROBLEMS)].problem]
    for name, value in [*decide.items(), *free.items()]:
        if value is not None:
            words += [f"--{name}", str(value)]
    drawn = {name: draw.choice(values) for name, values in RECIPE.items()}
    if recipe := {name: value for name, value in drawn.items() if value is not None}:
        words += ["--recipe", json.dumps({"schedule": recipe})]
    if free["evict"] == "recompute" or free["attention"] is not None:
        decide["dtype"] = "float64"  # in which KV that is computed again is the same
        words += ["--dtype", "float64"]
    return words, decide


def _run_once(
    words: Sequence[str], decide: Mapping[str, Any], problems: Sequence[Problem]
) -> dict[str, Any]:
    """One command in this process. Its outcome, and what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "run"
        where = ["--json"] if words[0] == "solve" else ["--out", str(results)]
        if "--recipe" in words:
            place, file = words.index("--recipe") + 1, Path(folder) / "recipe.yaml"
            file.write_text(words[place], encoding="utf-8")
            words = [*words[:place], str(file), *words[place + 1 :]]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = beamwright([*words, *where])
        except BaseException:
            return {"outcome": "traceback", "error": traceback.format_exc()[-2000:]}
        said = err.getvalue().strip()[-2000:]
        if "internal error" in said or "Traceback" in said:
            return {"outcome": "traceback", "error": said}
        if code == 2:
            return {"outcome": "refused", "error": said}
        if words[0] == "solve":
            if code:
                return {"outcome": "capacity" if "exhausted" in said else "failed", "error": said}
            found = [json.loads(out.getvalue())]
            found[0]["problem"] = words[1]
        else:
            lines = (results / "results.jsonl").read_text(encoding="utf-8").splitlines()
            found = [json.loads(line) for line in lines]
    return _compared(found, decide, problems)


def _compared(
    found: Sequence[Mapping[str, Any]], decide: Mapping[str, Any], problems: Sequence[Problem]
) -> dict[str, Any]:
    """Whether trees are those of the same searches alone, with room."""
    ids = {each.unique_id: each.problem for each in problems}
    alone, short = _alone(tuple(decide.items())), 0
    for each in found:
        if each.get("tree_hash") is None:
            if "exhausted" not in str(each.get("error")):
                return {"outcome": "failed", "error": str(each.get("error"))}
            short += 1
            continue
        key = each.get("unique_id", 0)  # of eval's
        text = ids[key] if key else each["problem"]
        if each["tree_hash"] != alone(key, text):
            return {"outcome": "unequal" if each.get("exact", True) else "inexact"}
    return {"outcome": "capacity" if short else "equal"}


@cache
def _alone(decide: tuple[tuple[str, Any], ...]) -> Any:
    """Tree hashes of these searches by problem, each computed once."""
    options = {name.replace("-", "_"): value for name, value in decide}
    solver = Solver(**options, schedule="in-gpu", executor="plain", speculation="off")
    return cache(lambda key, text: solver.solve(text, problem_id=key).tree_hash)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Do slots, budgets and company change a tree?")
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
    parser.add_argument("--random", type=int, help="run so many random option sets instead")
    parser.add_argument("--first", type=int, default=0, help="of them: go on from this one")
    parser.add_argument("--seed", type=int, default=0, help="of them")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.random is not None:
        finish("schedules_random", random_sets(args.random, args.first, args.seed))
        return
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
