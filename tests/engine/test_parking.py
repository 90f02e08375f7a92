"""Rows that park on the host and come back: same trees, nothing computed twice, nothing leaks."""

import pytest

from beamwright.engine.batch import RunningBatch
from beamwright.errors import CapacityError
from engines import (
    PROBLEM,
    assert_nothing_allocated,
    assert_same,
    check_conservation,
    exact_dtype,
    grow,
)

FIXED = {
    **{"n": 16, "width": 4, "max_rounds": 3, "step_tokens": 40, "max_tokens": 120},
    **{"ignore_eos": True, "host_memory": "8MiB", "dtype": exact_dtype(), "schedule": "locality"},
}
LENGTHS = {"fixed": {}, "varied": {"step_tokens": None, "max_step_tokens": 40}}
BATCHING = ("grouped", "continuous", "auto")


def block_bytes(solver):
    return solver.generator.store.pool.bytes_per_block


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_trees_do_not_depend_on_batching_or_budget(make_solver, parked, lengths, seed):
    """And what a parked row has written is never computed again."""
    options = {**FIXED, **LENGTHS[lengths], "seed": seed}
    with make_solver(**options) as solver:
        expected, _ = grow(solver)
        size = block_bytes(solver)
    for budget in (26, 60):
        for batching in BATCHING:
            with make_solver(**options, kv_memory=budget * size, batching=batching) as solver:
                found, _ = grow(solver)
            assert found.tree_hash == expected.tree_hash
            assert found.tokens.generator_prefilled == expected.tokens.generator_prefilled
            assert found.kv.recomputed_tokens == 0
            parks = found.batch.parking_plans
            assert (parks > 0) >= (batching == "continuous")
            assert parks == 0 or batching != "grouped"
    assert parked


def test_pools_are_conserved_while_rows_come_and_go(make_solver, parked, monkeypatch):
    real = RunningBatch.iterate

    def iterate(batch):
        events = real(batch)
        batch._cache.check()
        return events

    monkeypatch.setattr(RunningBatch, "iterate", iterate)
    with make_solver(**FIXED, kv_memory=28 * 4096, batching="continuous") as solver:
        for seed in range(3):
            solver.solve(
                PROBLEM,
                seed=seed,
                on_round=lambda report: check_conservation(solver, [report.tree]),
            )
        assert_nothing_allocated(solver)
    assert len(parked) > 9


def test_the_least_budget_is_one_path_and_its_step(make_solver):
    """Below it one line says so; from it on the tree is the same."""
    with make_solver(**FIXED) as solver:
        expected = solver.solve(PROBLEM).tree_hash
        size = block_bytes(solver)
    fitting = []
    for blocks in (16, 20, 24):
        with make_solver(**FIXED, kv_memory=blocks * size, batching="continuous") as solver:
            try:
                assert solver.solve(PROBLEM).tree_hash == expected
                fitting.append(blocks)
            except CapacityError:
                assert not fitting, "less was enough"
            assert_nothing_allocated(solver)
    assert 16 < fitting[0] < 25


def test_a_full_host_hangs_nobody(make_solver):
    """What it cannot take early stays where it is; it is an error where its room is needed."""
    small = {"search": "best-of-n", "n": 8, "max_rounds": 5, "step_limits": "3,20"}
    small |= {"max_tokens": 12, "dtype": exact_dtype()}
    with make_solver(**small) as solver:
        roomy, size = solver.solve(PROBLEM), block_bytes(solver)
    with make_solver(**small, kv_memory=16 * size, host_memory=4 * size) as solver:
        assert_same(solver.solve(PROBLEM), roomy)
        assert_nothing_allocated(solver)
    for blocks in (2, 8):
        with make_solver(**small, kv_memory=8 * size, host_memory=blocks * size) as solver:
            (found,) = solver.solve_many([PROBLEM])
            assert isinstance(found, CapacityError), found
            assert "host KV budget" in str(found)
            assert_nothing_allocated(solver)
