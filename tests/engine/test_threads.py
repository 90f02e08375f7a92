"""How many of torch's threads compute, and how they wait."""

import threading

import pytest
import torch

from beamwright.engine import threads
from beamwright.engine.threads import SMALL_PARAMETERS, Threads, all_threads, threads_for
from engines import PROBLEM


@pytest.fixture
def host_threads(monkeypatch):
    """A host program that has given torch two threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("host_threads")
def test_small_models_have_one_thread_and_large_ones_all_or_as_many_as_is_said(monkeypatch):
    assert threads_for(SMALL_PARAMETERS).count == 1
    assert threads_for(SMALL_PARAMETERS + 1).count == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = threads_for(SMALL_PARAMETERS)
    assert (found.count, found.why) == (2, "OMP_NUM_THREADS is set")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    with all_threads().in_use():
        assert torch.get_num_threads() == 1
    assert "quota" in threads_for(SMALL_PARAMETERS + 1).why


def test_one_idle_pool_is_parked_where_the_environment_set_no_wait_policy(monkeypatch):
    def count():
        return [thread.name for thread in threading.enumerate()].count("beamwright-openmp")

    threads._hold_idle_threads.cache_clear()
    before = count()
    for number, policy, parked in (
        (2, "GOMP_SPINCOUNT=7", 0),
        (1, None, 0),
        (2, None, 1),
        (2, None, 1),
    ):
        monkeypatch.setattr(threads, "wait_policy", lambda policy=policy: policy)
        with Threads(number, "").in_use():
            torch.ones(512, 512) @ torch.ones(512, 512)
            assert count() == before + parked


@pytest.mark.usefixtures("host_threads")
def test_search_and_self_test_use_one_thread_and_put_the_number_back(make_solver, monkeypatch):
    seen = []

    def look(*_):
        seen.append(torch.get_num_threads())

    def fail(_):
        raise KeyError("a callback's own error")

    with monkeypatch.context() as patch:
        patch.setattr("beamwright.engine.selftest.batches_are_exact", look)
        solver = make_solver(n=4, width=2, max_rounds=2)
    assert set(seen) == {1}
    solver.solve(PROBLEM, on_round=look)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError):
        solver.solve(PROBLEM, on_round=fail)
    assert torch.get_num_threads() == 2
    with Threads(2, "").in_use():
        torch.set_num_threads(1)
    assert torch.get_num_threads() == 2
