"""Sparse decoding under every schedule: the trees of each problem alone, with all KV on the device.

Problems of `bundled:test`, whose paths select from their 48th token on; budgets of KV, rows at a
time, problems in flight, speculation, executors, ranks, and KV at home on the host.

    python -m beamwright_lab.sparse.sameness --problems 50
"""

from __future__ import annotations

import argparse
from typing import Any

from beamwright import Solution, Solver
from beamwright.evaluate import load_problems
from beamwright_lab.common import finish, say, table

BASE = {
    **{"model": "bundled", "verifier": "bundled", "search": "beam", "n": 8, "width": 4},
    **{"max_rounds": 8, "sparse_from": 48},
}
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"sparse": "exact", "select": 48},
    "ahead, corrected": {"sparse": "ahead", "sparse_correct": 0.8, "select": 48},
    "ahead-pages": {"sparse": "ahead-pages", "select": 48},
    "asyncspade": {"sparse": "asyncspade", "select": 96},
}
HOME = {"sparse_home": "host", "kv_memory": "4MiB"}
WAYS: dict[str, dict[str, Any]] = {
    "3 rows at a time": {"max_batch": 3},
    "speculation": {"speculation": "exact", "in_flight": 4},
    "locality, little KV": {"schedule": "locality", "kv_memory": "3MiB", "in_flight": 4},
    "a lane, decoupled": {"executor": "overlapped", "explore": "decoupled", "in_flight": None},
    "thread": {"sparse_rank": "thread", "in_flight": 8},
    "at home, inline": {**HOME, "sparse_rank": "inline", "in_flight": 8},
    "at home, thread": {**HOME, "in_flight": 8},
}
COLUMNS = ("method", *WAYS, "of")


def trees(problems: list[tuple[str, str]], **options: Any) -> dict[str | int, str]:
    """Hashes by problem; an error's words where it could not be solved."""
    in_flight = options.pop("in_flight", 1)
    with Solver(**BASE, **options) as solver:
        found = dict(solver.solve_many(problems, in_flight=in_flight or "auto"))
    return {
        name: each.tree_hash if isinstance(each, Solution) else f"{type(each).__name__}: {each}"
        for name, each in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    found = load_problems("bundled:test", limit=args.problems).problems
    problems = [(each.unique_id, each.problem) for each in found]
    rows = []
    for method, options in ((name, METHODS[name]) for name in args.methods):
        alone = trees(problems, **options)
        row: dict[str, Any] = {"method": method, "of": len(problems)}
        for way, changes in WAYS.items():
            others = trees(problems, **options, **changes)
            row[way] = sum(others[name] == tree for name, tree in alone.items())
            errors = {each for each in others.values() if ":" in each}
            say(method, way, row[way], *errors)
        rows.append(row)
    print(table(rows, COLUMNS))
    finish("sparse_sameness", {"rows": rows})


if __name__ == "__main__":
    main()
