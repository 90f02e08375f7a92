"""The trees that the bundled models grow in float64: `tests/support/bundled_trees.py` pins them.

Pin them again after a bundled model has been trained anew, or where a change of sampling is meant.
"""

import json
from functools import partial
from pathlib import Path

from beamwright import Solver
from beamwright.evaluate.problems import load_problems
from beamwright.sparse.rule import METHODS
from tables import beside

FILE = Path(__file__).parents[1] / "data" / "bundled_trees.json"
_TABLE = beside(__file__)
STRATEGIES, SCHEDULES = _TABLE["strategies"], _TABLE["schedules"]
GREEDY = _TABLE["greedy"]

MORE_MEMORY = {
    ("locality", "revise"): "1300KiB",
    ("layerwise", "revise"): "1600KiB",
    ("locality", "aggregate"): "2500KiB",
    ("layerwise", "aggregate"): "2500KiB",
}
"""Their paths are longer."""

SPECULATES = {"beam", "dvts", "lookahead", "mcts"}
"""Of these, steps are decoded ahead here; others have nothing to decode ahead, or draw what lives
on."""

_IN_GPU = {"schedule": "in-gpu", "speculation": "off"}


def solve(num_problems=1, **options):
    """Solutions of the first problems of bundled:dev; two in flight if they explore decoupled."""
    problems = [each.problem for each in load_problems("bundled:dev", 2).problems]
    usual = {"model": "bundled", "verifier": "bundled", "dtype": "float64", "kv_memory": "64MiB"}
    with Solver(**{**usual, **options}) as solver:
        if "explore" in options:
            return solver.solve_many(problems)[:num_problems]
        return [solver.solve(each, problem_id=i) for i, each in enumerate(problems[:num_problems])]


def grow_strategy(search, **options):
    """The solution of the first problem."""
    return solve(search=search, **{**STRATEGIES[search], **options})[0]


def hashes(**options):
    return [solution.tree_hash for solution in solve(**options)]


CASES = {
    "beam search with the bundled verifier": partial(hashes, num_problems=2, n=8, width=4),
    "best of n by log-probability": partial(
        hashes, num_problems=2, verifier="logprob", search="best-of-n", n=4
    ),
    "dvts with top-p": partial(hashes, num_problems=2, search="dvts", n=8, width=4, top_p=0.9),
    **{
        search: partial(hashes, search=search, **{**options, **_IN_GPU})
        for search, options in STRATEGIES.items()
    },
    **{name: partial(hashes, **options) for name, options in GREEDY.items()},
    **{f"sparse {name}": partial(hashes, sparse=name, **_TABLE["sparse"]) for name in METHODS},
}
"""By name: what finds the hashes of a case's trees."""


if __name__ == "__main__":
    found = {name: grow() for name, grow in CASES.items()}
    FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
