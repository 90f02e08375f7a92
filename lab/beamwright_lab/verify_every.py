"""Measures searches whose verifier scores only every g-th step (VG-Search).

    python -m beamwright_lab.verify_every --model FILE.gguf --verifier judge:FILE.gguf

For each problem, every g solves it in turn with the same solver. The gain depends on the cost of a
verifier call: a reward model keeps its KV and reads each token once for any g, while a judge
generates text in each call.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from beamwright import Solver
from beamwright.evaluate.problems import load_problems
from beamwright_lab.common import finish, table

_NUMBERS = {"limit": 4, "n": 16, "max-tokens": 192, "max-step-tokens": 48}


def measure(solver: Solver, problem: str, every: int) -> dict[str, float]:
    started_s = time.perf_counter()
    solution = solver.solve(problem, verify_every=every)
    return {
        "seconds": time.perf_counter() - started_s,
        "verify_s": solution.time.verify_s,
        "generated": solution.tokens.generated,
        "verifier read": solution.tokens.verifier_prefilled,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--dataset", default="bundled:test")
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    problems = [problem.problem for problem in load_problems(args.dataset, args.limit).problems]
    rows: list[dict[str, Any]] = [{"every": every} for every in args.every]
    with Solver(
        model=args.model,
        verifier=args.verifier,
        search="beam",
        n=args.n,
        max_tokens=args.max_tokens,
        max_step_tokens=args.max_step_tokens,
    ) as solver:
        measure(solver, problems[0], 1)  # the first search also warms up
        for problem in problems:
            for row in rows:
                for name, value in measure(solver, problem, row["every"]).items():
                    row[name] = round(row.get(name, 0) + value, 2)
    print(table(rows, list(rows[0])))
    finish("verify_every", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
