"""How much computes at a time: trials of both ways, and torch's threads."""

import math

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.engine import concurrency
from beamwright.engine.concurrency import (
    LASTS,
    PAIRS,
    SMALL_PARAMETERS,
    WINDOW_S,
    GiveWay,
    Threads,
    Trial,
    free_cores,
    threads_for,
)
from beamwright.engine.selftest import threads_agree
from beamwright.models.decoder import Decoder, Linear
from beamwright.models.shape import shape_from_text
from beamwright.models.weights import random_weights
from engines import PROBLEM, assert_nothing_allocated, exact_dtype, tiny_solver

# --- the verifier beside decoding, or in turn ------------------------------------------------


class Machine:
    """Decodes at a rate of its own in either way, on a clock of its own."""

    def __init__(self, beside_tok_s, turns_tok_s):
        self.rates, self.now = {True: beside_tok_s, False: turns_tok_s}, 0.0
        self.trial = Trial(lambda: self.now)

    def ways(self, num_windows, pieces=5):
        """How every window was worked in."""
        found = []
        self.trial.note(0, awaited=False)
        for _ in range(num_windows):
            beside = self.trial.beside
            for _ in range(pieces):
                self.now += WINDOW_S / pieces * 1.001
                self.trial.note(round(self.rates[beside] * WINDOW_S / pieces), awaited=False)
            found.append(beside)
        return found


@pytest.mark.parametrize("beside", [True, False])
def test_the_faster_one_runs_when_both_were_tried(beside):
    machine = Machine(*(2000, 1000) if beside else (1000, 2000))
    found = machine.ways(2 * PAIRS + LASTS + 2)
    assert found[: 2 * PAIRS] == [True, False] * PAIRS
    assert set(found[2 * PAIRS : -2]) == {beside}
    machine.rates = {each: 3000 - rate for each, rate in machine.rates.items()}
    found = machine.ways(4 * PAIRS)
    assert found[-1] is not beside, "they are tried again"


def test_a_window_ends_where_no_score_is_awaited():
    machine = Machine(1, 1)
    machine.trial.note(0, awaited=False)
    assert not machine.trial.drains
    machine.now += 2 * WINDOW_S
    assert machine.trial.drains
    machine.trial.note(10, awaited=True)
    assert machine.trial.beside
    machine.trial.note(0, awaited=False)
    assert not machine.trial.beside
    assert machine.trial.drains


def test_time_between_runs_counts_for_nobody():
    machine = Machine(1, 1)
    machine.trial.note(0, awaited=False)
    machine.now += 100.0
    machine.trial.begin()
    machine.trial.note(5, awaited=False)
    assert machine.trial.beside
    assert not machine.trial.drains


def test_trees_do_not_depend_on_it(generator_folder, verifier_folder, monkeypatch):
    """A window for every piece of work: it changes its mind all the time."""
    monkeypatch.setattr("beamwright.engine.concurrency.WINDOW_S", 0.0)
    monkeypatch.setattr(concurrency, "num_cores", lambda: 2)
    problems = [(i, f"Ann has {i + 3} apples. She eats {i % 3}.") for i in range(6)]
    options = {"n": 8, "width": 4, "max_rounds": 6, "verifier": str(verifier_folder)}
    found = {}
    for executor in ("plain", "auto"):
        with tiny_solver(
            generator_folder, **options, executor=executor, dtype=exact_dtype()
        ) as solver:
            solved = dict(solver.solve_many(problems, in_flight=4))
            found[executor] = {name: each.tree_hash for name, each in solved.items()}
            assert_nothing_allocated(solver)
            windows = solver._machinery.trial._windows
        assert bool(windows) == (executor == "auto" and solver.threads.count == 1)
    assert found["plain"] == found["auto"]


# --- threads ---------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("host_threads")
def test_search_and_self_test_use_one_thread_and_put_the_number_back(make_solver, monkeypatch):
    seen = []

    def look(*_):
        seen.append(torch.get_num_threads())

    def fail(_):
        raise KeyError("a callback's own error")

    with monkeypatch.context() as patch:
        patch.setattr("beamwright.solver.assembly.batches_are_exact", look)
        solver = make_solver(n=4, width=2, max_rounds=2)
    assert seen == [1]
    solver.solve(PROBLEM, on_round=look)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError):
        solver.solve(PROBLEM, on_round=fail)
    assert torch.get_num_threads() == 2
    with Threads(2, "", gives_way=True).in_use():
        torch.set_num_threads(1)
    assert torch.get_num_threads() == 2


# --- giving way ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("host_threads")
def test_only_free_cores_are_taken_and_one_at_least(monkeypatch):
    monkeypatch.setattr(concurrency, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(concurrency, "_LOOK_SHARE", math.inf)
    free = [2]
    give_way, seen = GiveWay(2, lambda: free[0]), []
    for free[0] in (2, 1, 0, -5, 9, None):
        give_way()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 1, 2, 2]


def test_it_looks_a_few_hundred_times_a_second_at_most(monkeypatch):
    monkeypatch.setattr(concurrency, "_LOOK_EVERY_S", 3600.0)
    looks = []
    give_way = GiveWay(torch.get_num_threads(), lambda: looks.append(1))
    for _ in range(5):
        give_way()
    assert len(looks) == 1


def test_looking_takes_a_small_share_of_the_time(monkeypatch):
    monkeypatch.setattr(concurrency, "_LOOK_EVERY_S", 0.0)
    now = [0.0]
    monkeypatch.setattr(concurrency.time, "perf_counter", lambda: now[0])

    def look():
        now[0] += 0.001

    give_way = GiveWay(torch.get_num_threads(), look)
    give_way()
    looked = now[0]
    now[0] = looked + 0.09
    give_way()
    assert now[0] == looked + 0.09
    now[0] = looked + 0.11
    give_way()
    assert now[0] > looked + 0.11


def test_cores_that_others_run_on_are_not_free(tmp_path, monkeypatch):
    for number, state in enumerate("RSR"):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a ) name) {state} 1 1")
    (tmp_path / "gone").mkdir()
    load = tmp_path.parent / "loadavg"
    load.write_text("0.50 0.40 0.30 5/321 999\n")
    monkeypatch.setattr(concurrency, "_LOAD", load)
    monkeypatch.setattr(concurrency, "_OWN", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert free_cores() == 8 - (5 - 2)
    load.write_text("no such thing")
    assert free_cores() is None
    monkeypatch.setattr(concurrency, "_LOAD", tmp_path / "nowhere")
    assert free_cores() is None


@pytest.mark.usefixtures("host_threads")
def test_a_model_whose_bits_follow_the_threads_gives_no_way():
    text = "llama,layers=1,hidden=64,heads=2,kv_heads=1,intermediate=96,vocab=99,context=128"
    shape = shape_from_text(text)
    decoder = Decoder(shape, random_weights(shape, torch.float64, "cpu", 0))
    assert threads_agree(decoder, make_attention("reference"), 2)

    class Follows(Linear):
        def __call__(self, x):
            return super().__call__(x) * torch.get_num_threads()

    decoder.weights.lm_head = Follows(decoder.weights.lm_head.weight)
    assert not threads_agree(decoder, make_attention("reference"), 2)
    assert torch.get_num_threads() == 2
