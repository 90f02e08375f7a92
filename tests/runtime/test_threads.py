"""Small models compute with one thread, and the host program's number comes back."""

import pytest
import torch

from beamwright.runtime.threads import SMALL_PARAMETERS, threads_for
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
def test_small_models_have_one_thread_and_large_ones_all():
    assert threads_for(SMALL_PARAMETERS).count == 1
    assert threads_for(SMALL_PARAMETERS + 1).count == 2


@pytest.mark.usefixtures("host_threads")
def test_who_says_how_many_gets_as_many(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = threads_for(SMALL_PARAMETERS)
    assert (found.count, found.why) == (2, "OMP_NUM_THREADS is set")


@pytest.mark.usefixtures("host_threads")
def test_a_search_uses_one_thread_and_puts_the_number_back(make_solver):
    solver = make_solver(n=4, width=2, max_rounds=2)
    assert torch.get_num_threads() == 2
    seen = []
    solver.solve(PROBLEM, on_round=lambda _: seen.append(torch.get_num_threads()))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("host_threads")
def test_the_number_comes_back_after_an_error(make_solver):
    def fail(_):
        raise KeyError("a callback's own error")

    with pytest.raises(KeyError):
        make_solver(n=4, width=2, max_rounds=2).solve(PROBLEM, on_round=fail)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("host_threads")
def test_the_self_test_asks_with_the_threads_that_are_used(make_solver, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "beamwright.solver.solver.batches_are_exact",
        lambda *_: seen.append(torch.get_num_threads()),
    )
    make_solver()
    assert seen == [1]
