"""Trees that are decoded each in its own way, in one batch: each is what it would be alone."""

from functools import cache

import pytest

from engines import PROBLEM, assert_nothing_allocated, facts, tiny_solver

COMMON = {"n": 6, "width": 2, "max_rounds": 3, "dtype": "float64"}
LIMITS = {"delimiter": "e", "max_step_tokens": 12, "max_tokens": 40}
CONTINUOUS = {"batching": "continuous"}
REQUESTS = {
    "plain": {},
    "greedy": {"temperature": 0.0, "max_step_tokens": 30},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "seed": 1, "delimiter": "a"},
    "min-p": {"temperature": 1.3, "min_p": 0.1, "seed": 2, "delimiter": " t", "max_tokens": 60},
    "top-k": {"top_k": 7, "seed": 3, "max_tokens": 25},
    "fixed": {"step_tokens": 9, "seed": 4, "ignore_eos": True},
    "stops": {"stop_strings": ["a", "th", "e"], "seed": 5, "delimiter": "x"},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "step_limits": "3,30"},
}


def together(solver, requests):
    """The trees of these requests, all in flight at a time."""
    handles = {
        name: solver.submit(PROBLEM, problem_id=name, **{**LIMITS, **options})
        for name, options in requests.items()
    }
    trees = {name: handle.result(600).tree for name, handle in handles.items()}
    solver.close()
    assert_nothing_allocated(solver)
    return {name: facts(tree) for name, tree in trees.items()}


@pytest.fixture(scope="module")
def alone(generator_folder):
    """What each request's tree is where the whole solver has its settings."""

    @cache
    def solve(name):
        with tiny_solver(generator_folder, **{**COMMON, **LIMITS, **REQUESTS[name]}) as solver:
            return facts(solver.solve(PROBLEM, problem_id=name).tree)

    return solve


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": "on", "max_batch": 11},
        {"schedule": "locality", "kv_memory": 15 * 8192, "host_memory": "4MiB", **CONTINUOUS},
    ],
    ids=str,
)
def test_mixed_requests_grow_the_trees_that_they_grow_alone(make_solver, alone, options):
    with make_solver(**COMMON, **options) as solver:
        found = together(solver, REQUESTS)
    assert {name: alone(name) for name in REQUESTS} == found
    assert len({str(tree) for tree in found.values()}) == len(REQUESTS)
