"""Trees that are decoded each in its own way, in one batch: each is what it would be alone."""

from functools import cache

import pytest

from beamwright.engine.row import Decoding
from beamwright.errors import InputError
from beamwright.sections import SamplingSettings, StepSettings
from beamwright.solver.scheduler import listed
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


def decoding(options):
    own = {"temperature": 1.0, **LIMITS, **options}
    parts = [
        kind.model_validate({name: own[name] for name in kind.model_fields if name in own})
        for kind in (SamplingSettings, StepSettings)
    ]
    return Decoding(*parts, own.get("seed", 0))


def together(solver, requests):
    """The trees of these requests, all in flight at a time."""
    names = {
        solver._request(PROBLEM, name, {**LIMITS, **options}): name
        for name, options in requests.items()
    }
    ended = solver._run(listed(names), len(names))
    trees = {names[request]: solution.tree for request, solution in ended}
    assert_nothing_allocated(solver)
    assert not solver._machinery.batch._lengths.decodings._by_root, "what was released is forgotten"
    return {name: facts(trees[name]) for name in requests}


@pytest.fixture(scope="module")
def alone(generator_folder):
    """What each request's tree is where the whole solver has its settings."""

    @cache
    def solve(name, **common):
        seen = []
        options = {**COMMON, **common, **LIMITS, **REQUESTS[name]}
        with tiny_solver(generator_folder, **options) as solver:
            solver.solve(PROBLEM, problem_id=name, on_round=lambda report: seen.append(report.tree))
        return facts(seen[-1])

    return solve


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 5},
        {"attention": "dense"},
        {"graphs": "on", "max_batch": 11},
        {"schedule": "locality", "kv_memory": 15 * 8192, "host_memory": "4MiB", **CONTINUOUS},
        {"deterministic": True},
    ],
    ids=str,
)
def test_mixed_requests_grow_the_trees_that_they_grow_alone(make_solver, alone, options):
    common = {name: options[name] for name in ("attention", "deterministic") if name in options}
    with make_solver(**COMMON, **options) as solver:
        found = together(solver, REQUESTS)
        preempted = solver._machinery.batch.counts.preempted
    assert {name: alone(name, **common) for name in REQUESTS} == found
    assert len({str(tree) for tree in found.values()}) == len(REQUESTS)
    assert "schedule" not in options or preempted


def test_settings_are_forgotten_with_the_root(make_solver):
    solver = make_solver(**COMMON)
    expected = together(solver, {"plain": {}})
    assert together(solver, {"plain": {"temperature": 0.0}}) != expected
    assert together(solver, {"plain": {}}) == expected


def test_a_delimiter_has_to_be_short(make_solver):
    solver = make_solver(**COMMON)
    tree = solver._prompts.tree("x", PROBLEM)
    with pytest.raises(InputError, match="at most 256 bytes"):
        solver._machinery.batch.decode_as(tree.root, decoding({"delimiter": "ab" * 200}))
