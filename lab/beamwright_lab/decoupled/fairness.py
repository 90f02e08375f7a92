"""Who waits how long where many problems share few slots, and what a priority buys.

Measured is the longest wait of a tree with open steps of which none runs, in steps of other trees
that are decoded meanwhile, against its bound (`beamwright.engine.turns`; round: steps of a round
of all in flight), and how many seconds it took from the start until the urgent problems, every
eighth, and the others had ended. All may be in flight; how many are is for `--explore`.
Required: no wait beyond the bound, and the trees of the run without priorities.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch

from beamwright import Solution, Solver
from beamwright.engine.engine import Engine
from beamwright.engine.turns import WAITING_ROUNDS
from beamwright.evaluate import Problem, load_problems
from beamwright_lab.common import finish, say, table

EXPLORES = ("continuous", "decoupled")
URGENT_EVERY = 8
COLUMNS = [
    "explore", "slots", "urgent", "longest_wait", "bound", "round", "urgent_s", "others_s",
    "last_s", "same_trees",
]  # fmt: skip


def measured(
    options: Mapping[str, Any], problems: Sequence[Problem], *, urgent: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """What one run has shown, and its trees."""
    engines: list[Engine] = []
    init = Engine.__init__

    def noted(engine: Engine, *args: Any, **kwargs: Any) -> None:
        engines.append(engine)
        init(engine, *args, **kwargs)

    first = {each.unique_id for each in problems[URGENT_EVERY - 1 :: URGENT_EVERY]}
    asked = [
        (p.unique_id, p.problem, {"priority": int(urgent and p.unique_id in first)})
        for p in problems
    ]
    ended_s, trees = {}, {}
    with Solver(**options) as solver, patch.object(Engine, "__init__", noted):
        start = time.perf_counter()
        for key, found in solver.solve_many(asked, in_flight=len(problems)):
            assert isinstance(found, Solution), found
            ended_s[str(key)], trees[str(key)] = time.perf_counter() - start, found.tree_hash
    (engine,) = engines
    turns = engine.turns
    row = {
        "explore": options["explore"],
        "slots": options["max_batch"],
        "urgent": len(first) if urgent else 0,
        "longest_wait": turns.longest,
        "round": turns.round_steps,
        "bound": WAITING_ROUNDS * turns.round_steps,
        "urgent_s": round(mean(ended_s[key] for key in first), 2),
        "others_s": round(mean(s for key, s in ended_s.items() if key not in first), 2),
        "last_s": round(max(ended_s.values()), 2),
    }
    return row, trees


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Who waits how long beside others?")
    parser.add_argument("--problems", type=int, default=64, help="of bundled:test")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--max-rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    problems = load_problems("bundled:test", args.problems).problems
    names = ("n", "width", "max_rounds")
    base = {"dtype": "float64", **{name: getattr(args, name) for name in names}}
    rows, first = [], None
    for explore, slots, urgent in product(EXPLORES, args.slots, (False, True)):
        options = {**base, "explore": explore, "max_batch": slots}
        row, trees = measured(options, problems, urgent=urgent)
        first = first or trees
        rows.append({**row, "same_trees": sum(trees[key] == first[key] for key in trees)})
        say(f"  {rows[-1]}")
    say(table(rows, COLUMNS))
    ok = all(each["longest_wait"] <= each["bound"] for each in rows)
    ok = ok and all(each["same_trees"] == len(problems) for each in rows)
    finish("fairness", {**base, "rows": rows, "ok": ok})


if __name__ == "__main__":
    main()
