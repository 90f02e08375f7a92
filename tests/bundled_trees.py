"""The trees that the bundled models grow in float64; `python tests/bundled_trees.py` pins them.

Pin them again after a bundled model has been trained anew, or where a change of sampling is meant.
"""

import json
from pathlib import Path

from beamwright import Solver
from beamwright.evaluate.problems import bundled_samples

FILE = Path(__file__).parent / "data" / "bundled_trees.json"
SEARCHES = {
    "beam search with the bundled verifier": {"verifier": "bundled", "n": 8, "width": 4},
    "best of n by log-probability": {"verifier": "logprob", "search": "best-of-n", "n": 4},
    "dvts with top-p": {"verifier": "bundled", "search": "dvts", "n": 8, "width": 4, "top_p": 0.9},
}
NUM_PROBLEMS = 2


def grow_trees(options):
    """Hashes of the trees of one search over the first problems of bundled:dev."""
    problems = [problem for problem, _ in bundled_samples(NUM_PROBLEMS)]
    with Solver(model="bundled", dtype="float64", kv_memory="64MiB", **options) as solver:
        return [solver.solve(problem, problem_id=i).tree_hash for i, problem in enumerate(problems)]


if __name__ == "__main__":
    found = {name: grow_trees(options) for name, options in SEARCHES.items()}
    FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
