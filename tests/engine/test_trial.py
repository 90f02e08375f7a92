"""Which of both ways runs: windows of each by turns, then the faster one, then again."""

import pytest

from beamwright.engine import concurrency
from beamwright.engine.concurrency import LASTS, PAIRS, WINDOW_S, Trial
from engines import assert_nothing_allocated, exact_dtype, tiny_solver


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
