"""The trees that the bundled models grow in float64: `tests/support/bundled_trees.py` pins them.

Pin them again after a bundled model has been trained anew, or where a change of sampling is meant.
"""

import json
from pathlib import Path

from beamwright import Solver
from beamwright.evaluate.problems import load_problems
from beamwright.sparse.rule import METHODS

FILE = Path(__file__).parents[1] / "data" / "bundled_trees.json"
SEARCHES = {
    "beam search with the bundled verifier": {"verifier": "bundled", "n": 8, "width": 4},
    "best of n by log-probability": {"verifier": "logprob", "search": "best-of-n", "n": 4},
    "dvts with top-p": {"verifier": "bundled", "search": "dvts", "n": 8, "width": 4, "top_p": 0.9},
}
NUM_PROBLEMS = 2
_SMALL = {"n": 4, "width": 2}
STRATEGIES = {
    "beam": _SMALL,
    "varying": {"delimiter": "@@", "max_tokens": 90, "n": 2, "width": 2},
    "best-of-n": _SMALL,
    "majority": _SMALL,
    "weighted": _SMALL,
    "deepconf": {**_SMALL, "warmup": 2},
    "dvts": _SMALL,
    "dynamic": _SMALL,
    "lookahead": _SMALL,
    "mcts": {**_SMALL, "nodes": 12},
    "particles": _SMALL,
    "revise": {"n": 2},
}
"""Every strategy, small: options of one problem."""

SCHEDULES = {
    "locality": {"schedule": "locality", "kv_memory": "560KiB", "speculation": "off"},
    "layerwise": {"schedule": "layerwise", "kv_memory": "900KiB", "speculation": "off"},
    "speculation": {"schedule": "in-gpu", "speculation": "exact"},
    "decoupled": {"schedule": "in-gpu", "explore": "decoupled", "speculation": "exact"},
}
"""Each grows the trees of in-gpu. With so little memory KV leaves the device and comes back."""

MORE_MEMORY = {("locality", "revise"): "1300KiB", ("layerwise", "revise"): "1600KiB"}
"""Its paths are longer."""

SPECULATES = {"beam", "dvts", "lookahead", "mcts"}
"""Of these, steps are decoded ahead here; others have nothing to decode ahead, or draw what lives
on."""

SPARSE = tuple(METHODS)

GREEDY = {
    "greedy beam": {**_SMALL, "verifier": "bundled"},
    "greedy mcts by log-probability": {
        **{**_SMALL, "search": "mcts", "nodes": 12},
        "verifier": "logprob",
    },
}
"""Trees that a generator elsewhere grows, too: it draws with other random numbers."""


def grow_trees(options):
    """Hashes of the trees of one search over the first problems of bundled:dev."""
    problems = [each.problem for each in load_problems("bundled:dev", NUM_PROBLEMS).problems]
    with Solver(model="bundled", dtype="float64", kv_memory="64MiB", **options) as solver:
        return [solver.solve(problem, problem_id=i).tree_hash for i, problem in enumerate(problems)]


def grow_strategy(search, **options):
    """The solution of the first problem; of two in flight where they explore decoupled."""
    problems = [each.problem for each in load_problems("bundled:dev", NUM_PROBLEMS).problems]
    given = {"kv_memory": "64MiB", "verifier": "bundled", **STRATEGIES[search], **options}
    with Solver(model="bundled", dtype="float64", search=search, **given) as solver:
        if "explore" in options:
            return solver.solve_many(problems)[0]
        return solver.solve(problems[0])


def in_gpu(search):
    return [grow_strategy(search, schedule="in-gpu", speculation="off").tree_hash]


def sparse(method):
    options = {"schedule": "in-gpu", "sparse": method, "select": 24, "sparse_from": 32}
    options["max_rounds"] = 5  # a method that misses what matters writes on and on
    return [grow_strategy("beam", **options).tree_hash]


def greedy(name, model="bundled", **options):
    """The tree of likeliest tokens; model: of which the tokenizer is the bundled one."""
    (problem,) = (each.problem for each in load_problems("bundled:dev", 1).problems)
    given = {"dtype": "float64", "temperature": 0.0, **GREEDY[name], **options}
    with Solver(model=model, **given) as solver:
        return [solver.solve(problem).tree_hash]


def grow_all():
    """Everything that is pinned: hashes by name."""
    found = {name: grow_trees(options) for name, options in SEARCHES.items()}
    found |= {search: in_gpu(search) for search in STRATEGIES}
    found |= {name: greedy(name) for name in GREEDY}
    return found | {f"sparse {method}": sparse(method) for method in SPARSE}


if __name__ == "__main__":
    found = grow_all()
    FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
