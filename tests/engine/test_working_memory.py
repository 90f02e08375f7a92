"""The device runs out of working memory: the group shrinks, the tree stays the same."""

import pytest
import torch

from beamwright.errors import DeviceMemoryError
from engines import PROBLEM, FailingDevice, assert_nothing_allocated, assert_same, grow

SMALL = {"n": 16, "width": 4, "max_rounds": 6, "host_memory": "1MiB"}
HOW = [
    {"schedule": "in-gpu"},
    {"attention": "dense"},
    {"schedule": "locality", "kv_memory": 22 * 4096, "graphs": "on"},
]


@pytest.mark.parametrize("how", HOW)
def test_a_group_that_is_too_large_is_halved(make_solver, monkeypatch, how):
    expected, _ = grow(make_solver(**SMALL, **how))
    solver = make_solver(**SMALL, **how)
    device = FailingDevice(monkeypatch, lambda name, rows, _: name == "logits" and rows > 8)
    solution, tree = grow(solver)
    assert device.num_failures
    assert_same(solution, expected)
    assert solution.kv.groups >= expected.kv.groups
    assert solver._machinery.batch.view(tuple(tree.candidates())).max_beams <= 8


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.nightly) for how in HOW[:1]), *HOW[1:]]
)
def test_any_call_may_fail_once(make_solver, verifier_folder, monkeypatch, how):
    how = {**SMALL, "n": 4, "max_rounds": 3, **how, "verifier": str(verifier_folder)}
    solver = make_solver(**how)
    with monkeypatch.context() as patched:
        counting = FailingDevice(patched, lambda *_: False)
        expected, _ = grow(solver)
    single = 0
    for call in range(1, counting.num_calls + 1, max(1, counting.num_calls // 5)):
        solver = make_solver(**how)
        with monkeypatch.context() as patched:
            FailingDevice(patched, lambda name, rows, number, call=call: number == call)
            try:
                solution, _ = grow(solver)
            except DeviceMemoryError:
                assert_nothing_allocated(solver)
                single += 1  # a lone prompt or beam cannot be made smaller
                continue
        assert solution.tree_hash == expected.tree_hash
    assert single < 4


def test_one_beam_that_does_not_fit_ends_the_search_in_one_line(make_solver, monkeypatch):
    solver = make_solver(**SMALL)
    FailingDevice(monkeypatch, lambda name, rows, _: name == "logits")
    with pytest.raises(DeviceMemoryError, match="out of memory: one beam's step"):
        solver.solve(PROBLEM)
    assert_nothing_allocated(solver)


def test_a_prefill_that_does_not_fit_is_halved(make_solver, verifier_folder, monkeypatch):
    how = {**SMALL, "verifier": str(verifier_folder), "step_tokens": 10, "ignore_eos": True}
    expected, _ = grow(make_solver(**how))
    solver = make_solver(**how)
    device = FailingDevice(monkeypatch, lambda name, rows, _: name == "hidden" and rows > 64)
    solution, _ = grow(solver)
    assert device.num_failures
    assert_same(solution, expected)


def test_a_problem_that_runs_out_of_memory_costs_the_others_nothing(make_solver, monkeypatch):
    problems = [(name, PROBLEM) for name in "abc"]
    solver = make_solver(**SMALL)
    real = solver.verifier.score

    def score(nodes):
        if any(node.problem_id == "b" for node in nodes):
            raise torch.OutOfMemoryError("an injected failure")
        return real(nodes)

    expected = [solver.solve(text, problem_id=name).tree_hash for name, text in problems]
    monkeypatch.setattr(solver.verifier, "score", score)
    first, second, third = solver.solve_many(problems)
    assert isinstance(second, DeviceMemoryError)
    assert [first.tree_hash, third.tree_hash] == [expected[0], expected[2]]
    assert_nothing_allocated(solver)


def test_running_out_anywhere_else_is_one_line_too(make_solver, verifier_folder, monkeypatch):
    solver = make_solver(**SMALL, verifier=str(verifier_folder))

    def fail(*_):
        raise torch.OutOfMemoryError("an injected failure")

    monkeypatch.setattr(solver.verifier, "_read", fail)
    with pytest.raises(DeviceMemoryError, match=r"out of memory: a round .* \(verify\)"):
        solver.solve(PROBLEM)
    assert_nothing_allocated(solver)
