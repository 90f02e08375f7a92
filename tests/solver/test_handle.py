"""Problems that are submitted: results, cancelling, rounds, event loops."""

import asyncio
import subprocess
import sys
import threading

import pytest

from beamwright.errors import Cancelled, InputError
from engines import PROBLEM, assert_nothing_allocated

SMALL = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64"}
LONG_S = 120.0


@pytest.fixture
def solver(make_solver):
    made = make_solver(**SMALL)
    yield made
    made.close()
    assert_nothing_allocated(made)


@pytest.fixture
def gate(solver):
    """The first problem's search waits after its first round until the gate opens."""
    opened, reached = threading.Event(), threading.Event()

    def hold(report):
        reached.set()
        assert opened.wait(LONG_S)

    held = solver.submit(PROBLEM, problem_id="held", n=64, width=64, on_round=hold)
    assert reached.wait(LONG_S)
    yield opened
    opened.set()
    held.cancel()


def test_the_thread_that_searches_has_the_model_s_card_as_its_current_one(solver, monkeypatch):
    """CUDA knows one for each thread, the first to begin with, and launches kernels there."""
    asked = []

    def check(device):
        asked.append((threading.current_thread().name, device))

    monkeypatch.setattr("beamwright.solver.scheduler.check_device", check)
    solver.submit(PROBLEM).result(LONG_S)
    assert asked == [("solver", solver.settings.model.device)]


def test_one_that_is_cancelled_stops_and_the_others_do_not_notice(solver, gate):
    others = [solver.submit(PROBLEM, problem_id=i) for i in range(3)]
    cancelled = solver.submit(PROBLEM, problem_id="late")
    cancelled.cancel()
    assert cancelled.done(), "it waited for a place and is not begun"
    with pytest.raises(TimeoutError):
        others[0].result(0.0)
    gate.set()
    with pytest.raises(Cancelled):
        cancelled.result(LONG_S)
    found = [each.result(LONG_S).tree_hash for each in others]
    assert found == [solver.solve(PROBLEM, problem_id=i).tree_hash for i in range(3)]


def test_cancelling_in_the_middle_frees_its_kv_and_keeps_what_it_has(solver):
    seen, submitted = [], threading.Event()

    def cancel(report):
        seen.append(report)
        assert submitted.wait(LONG_S)
        handle.cancel()

    handle = solver.submit(PROBLEM, on_round=cancel)
    submitted.set()
    with pytest.raises(Cancelled) as caught:
        handle.result(LONG_S)
    assert len(seen) == 1
    assert caught.value.partial.rounds == 1
    assert caught.value.partial.candidates
    solver.close()
    assert_nothing_allocated(solver)
    assert solver.solve(PROBLEM).rounds == 3


def test_a_callback_cannot_wait_for_its_own_solver(solver):
    said, submitted = [], threading.Event()

    def wait(report):
        assert submitted.wait(LONG_S)
        with pytest.raises(InputError, match="callback"):
            other.result(LONG_S)
        with pytest.raises(InputError, match="this Solver is running a search"):
            solver.solve(PROBLEM)
        said.append(report.round)

    handle = solver.submit(PROBLEM, on_round=wait)
    other = solver.submit(PROBLEM, problem_id=1)
    submitted.set()
    assert handle.result(LONG_S).rounds == 3
    assert said == [1, 2, 3]


def test_closing_cancels_what_is_submitted_and_ends_the_thread(make_solver):
    solver = make_solver(**SMALL)
    handles = [solver.submit(PROBLEM, problem_id=i) for i in range(40)]
    solver.close()
    assert all(handle.done() for handle in handles)
    assert not [each for each in threading.enumerate() if each.name == "solver"]
    assert_nothing_allocated(solver)
    assert solver.submit(PROBLEM).result(LONG_S).rounds == 3


# --- event loops -----------------------------------------------------------------------------


def test_an_event_loop_awaits_handles(solver):
    async def ask():
        handles = [solver.submit(PROBLEM, problem_id=i) for i in range(3)]
        bad = solver.submit(" ")
        with pytest.raises(InputError):
            await bad
        return [(await handle).tree_hash for handle in handles]

    alone = [solver.solve(PROBLEM, problem_id=i).tree_hash for i in range(3)]
    assert asyncio.run(ask()) == alone


def test_who_waits_begins_by_priority(solver, gate):
    begun, wide = [], {"n": 64, "width": 64}

    def hear(report):
        begun.append(report.tree.root.problem_id)

    handles = [
        solver.submit(PROBLEM, problem_id=k, priority=priority, on_round=hear, **wide)
        for k, priority in enumerate([0, 5, -1, 5])
    ]
    gate.set()
    for handle in handles:
        handle.result(LONG_S)
    assert list(dict.fromkeys(begun)) == [1, 3, 0, 2]


def test_a_deadline_counts_while_a_problem_waits(solver, gate):
    late, other = (solver.submit(PROBLEM, problem_id=k, deadline="30s") for k in (1, 2))
    late._request.submitted_s -= 60
    gate.set()
    found = late.result(LONG_S)
    assert found.rounds == 1, "it has a result all the same"
    assert found.reason_fewer.endswith("--deadline 30s had passed")
    assert all(candidate.score is not None for candidate in found.candidates)
    assert other.result(LONG_S).tree_hash == solver.solve(PROBLEM, problem_id=2).tree_hash


@pytest.mark.nightly
def test_a_script_may_end_while_problems_are_solved():
    """Its thread was killed in the middle of PyTorch once, and the process with it (SIGABRT)."""
    code = f"""if True:
        import threading
        from beamwright import Solver
        begun = threading.Event()
        solver = Solver(model="bundled", n=16, width=4)
        for number in range(8):
            solver.submit({PROBLEM!r}, problem_id=number, on_round=lambda report: begun.set())
        begun.wait()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG_S)
