"""Memory that generator and verifier share: who has it changes the traffic, never the tree."""

import pytest
import torch

from beamwright.engine import executor
from beamwright.errors import CapacityError
from engines import PROBLEM, assert_nothing_allocated, exact_dtype, grow

LONG = {"n": 8, "max_rounds": 4, "max_step_tokens": 40, "max_tokens": 70, "host_memory": "8MiB"}


@pytest.fixture
def scored(make_solver, verifier_folder):
    """Solvers with a verifier that has KV of its own."""

    def make(**changes):
        options = {"verifier": str(verifier_folder), "dtype": exact_dtype(), **LONG, **changes}
        return make_solver(**options)

    return make


@pytest.fixture
def expected(scored):
    """The tree and the bytes of both models where everything fits."""
    solver = scored(schedule="in-gpu")
    solution, tree = grow(solver)
    peaks = [model.store.device_peak_bytes for model in solver._machinery.tree_models]
    return solution, [node.score for node in tree.nodes()], peaks


def test_memory_moves_while_a_search_runs(scored, expected, conserved):
    solution, _, peaks = expected
    with scored(kv_memory=int(0.6 * sum(peaks))) as solver:
        found, _ = grow(solver)
        first = solver._machinery.plan.generator_kv_bytes
        again, _ = grow(solver)
    assert len(set(conserved)) > 1
    assert min(conserved) < first < max(conserved)
    assert found.memory.moves == again.memory.moves > 2
    assert found.memory.moved_bytes == again.memory.moved_bytes > 0
    assert found.tree_hash == again.tree_hash == solution.tree_hash


def test_rows_go_on_when_memory_moves_under_them(scored, expected, conserved):
    """Scores come while others are decoded: their blocks change places in the middle of a step."""
    solution, _, peaks = expected
    total = int(0.6 * sum(peaks))
    with scored(speculation="exact", kv_memory=total, graphs="on") as solver:
        found, _ = grow(solver)
    assert found.tree_hash == solution.tree_hash
    assert found.memory.moves > 2
    assert found.kv.device_peak_bytes <= total


@pytest.mark.parametrize(("split", "executor"), [(0.3, "plain"), ("auto", "overlapped")])
def test_a_fixed_split_and_one_beside_a_lane_do_not_move(
    scored, expected, conserved, split, executor
):
    solution, _, peaks = expected
    total = int(1.2 * max(peaks[0] / 0.3, peaks[1] / 0.7))
    with scored(split=split, executor=executor, kv_memory=total) as solver:
        found = solver.solve(PROBLEM)
    assert found.tree_hash == solution.tree_hash
    assert not conserved
    assert (found.memory.split, found.memory.moves, found.memory.moved_bytes) == (split, 0, 0)
    assert found.memory.generator_kv_bytes + found.memory.verifier_kv_bytes == total
    assert split == "auto" or found.memory.generator_kv_bytes == pytest.approx(0.3 * total, abs=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize("speculation", ["off", "exact"])
def test_memory_moves_on_a_card(scored, conserved, speculation):
    """Between captured steps of one model and captured passes of the other, in one memory."""
    card = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "graphs": "on"}
    with scored(**card, schedule="in-gpu", split=0.5) as solver:
        solution, _ = grow(solver)
        peaks = [model.store.device_peak_bytes for model in solver._machinery.tree_models]
    tight = {**card, "kv_memory": int(0.6 * sum(peaks)), "speculation": speculation}
    with scored(**tight) as solver:
        found, _ = grow(solver)
        again, _ = grow(solver)
    assert found.tree_hash == again.tree_hash == solution.tree_hash
    assert found.memory.moves == again.memory.moves > 2
    assert found.kv.device_peak_bytes <= tight["kv_memory"]


def test_a_problem_that_two_lanes_have_no_room_for_is_solved_in_turns(scored, monkeypatch):
    monkeypatch.setattr(executor, "num_cores", lambda: 1024)
    long = {"width": 2, "max_tokens": 110}
    plain = scored(**long, schedule="in-gpu", executor="plain", speculation="off")
    tight = {**long, "kv_memory": 8 * 4096, "schedule": "locality"}
    with scored(**tight, executor="overlapped") as solver:
        assert isinstance(solver.solve_many([PROBLEM])[0], CapacityError)
    with scored(**tight, executor="auto") as solver:
        ((_, alone),) = solver.solve_many([(0, PROBLEM)], in_flight="auto")
        together = solver.solve_many([PROBLEM, PROBLEM])
        assert_nothing_allocated(solver)
    assert alone.tree_hash == together[0].tree_hash == plain.solve(PROBLEM).tree_hash
