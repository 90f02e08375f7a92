"""What `auto` stands for: settled once, before anything is built, and never what cannot run."""

import pytest

from beamwright.engine import executor
from beamwright.errors import CapacityError
from engines import PROBLEM, assert_nothing_allocated, exact_dtype

PROBLEMS = [PROBLEM, "Bob has 7 pens.", "Eve has 5 cats."]
TINY = {"n": 8, "width": 2, "max_rounds": 4, "host_memory": "8MiB", "dtype": exact_dtype()}
ROOM = {"schedule": "in-gpu", "executor": "plain", "speculation": "off"}
LONG = {"max_step_tokens": 40, "max_tokens": 110}


@pytest.fixture
def scored(make_solver, verifier_folder):
    """Solvers with a verifier that has KV of its own."""

    def make(**changes):
        return make_solver(**{"verifier": str(verifier_folder), **TINY, **changes})

    return make


# --- one object ------------------------------------------------------------------------------


def test_every_request_has_the_settled_settings(make_solver):
    with make_solver(**TINY, schedule="layerwise", speculation="auto") as solver:
        own = solver.solve(PROBLEM, temperature=0.5).settings
        many = [each.settings for each in solver.solve_many([(0, PROBLEM, {"seed": 3})])]
    for settings in (solver.settings, own, *many):
        schedule = settings.schedule
        assert (schedule.schedule, schedule.batching) == ("layerwise", "grouped")
        assert schedule.speculation == "off"
    assert own.sampling.temperature == 0.5
    again = make_solver(**TINY).__class__(solver.settings)
    assert again.settings == solver.settings


# --- what auto may choose --------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["tree", "dense"])
def test_layers_of_fewer_rows_are_streamed_where_those_of_all_do_not_fit(make_solver, attention):
    tiny = {**TINY, **LONG, "attention": attention}
    expected = make_solver(**tiny, schedule="in-gpu").solve(PROBLEM)
    whole = make_solver(**tiny, schedule="layerwise").solve(PROBLEM).kv.device_peak_bytes
    with make_solver(**tiny, schedule="layerwise", kv_memory=2 * whole // 3) as solver:
        found = solver.solve(PROBLEM)
        assert_nothing_allocated(solver)
    assert found.tree_hash == expected.tree_hash
    assert found.kv.device_peak_bytes <= 2 * whole // 3
    with make_solver(**tiny, schedule="layerwise", kv_memory=4096) as solver:
        one, other = solver.solve_many(PROBLEMS[:2])
        assert_nothing_allocated(solver)
    assert isinstance(one, CapacityError)
    assert isinstance(other, CapacityError)


# --- memory in turns -------------------------------------------------------------------------


def test_a_problem_that_two_lanes_have_no_room_for_is_solved_in_turns(scored, monkeypatch):
    monkeypatch.setattr(executor, "num_cores", lambda: 1024)
    expected = scored(**ROOM, **LONG).solve(PROBLEM).tree_hash
    tight = {**LONG, "kv_memory": 8 * 4096, "schedule": "locality"}
    with scored(**tight, executor="overlapped") as solver:
        assert isinstance(solver.solve_many([PROBLEM])[0], CapacityError)
    with scored(**tight, executor="auto") as solver:
        ((_, alone),) = solver.solve_many([(0, PROBLEM)], in_flight="auto")
        together = solver.solve_many([PROBLEM, PROBLEM])
        assert_nothing_allocated(solver)
    assert alone.tree_hash == together[0].tree_hash == expected
