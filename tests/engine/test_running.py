"""The running batch under any schedule: the same tokens, and nothing leaks."""

import random

import pytest

from beamwright.engine.batch import RunningBatch
from beamwright.engine.tensor_rows import TensorRowRunner
from beamwright.models.prefill_passes import Replay
from engines import PROBLEM, assert_nothing_allocated, exact_dtype, facts, grow
from recurring import load_recurring
from tape import put_late

SMALL = {"n": 6, "width": 2, "max_rounds": 3, "max_step_tokens": 20, "max_tokens": 44}
NUM_TESTS = 10


class Chaos:
    """Ends iterations, admits fewer rows and preempts others whenever a coin says so."""

    def __init__(self, monkeypatch, evicts):
        self.rng, self.evicts = random.Random(0), evicts
        self.num_preempted = self.num_begun = 0
        run, joining, iterate = TensorRowRunner.run, RunningBatch._next_rows, RunningBatch.iterate
        chaos = self

        def run_less(rows, running, max_tokens, enough, *, goes_on):
            most, least = chaos.rng.randint(1, max_tokens), chaos.rng.randint(1, enough)
            chaos.num_begun += rows._launched_ahead
            return run(rows, running, most, least, goes_on=chaos.rng.random() < 0.7)

        def some_join(batch):
            found = joining(batch)
            fewest = 0 if batch.running else min(1, len(found))
            return found[: chaos.rng.randint(fewest, len(found))] if found else found

        def preempt(batch):
            events = iterate(batch)
            while chaos.evicts and len(batch.running) > 1 and chaos.rng.random() < 0.2:
                batch._preempt(batch.running.pop(chaos.rng.randrange(len(batch.running))))
                batch._no_room = False
                chaos.num_preempted += 1
            return events

        monkeypatch.setattr(TensorRowRunner, "run", run_less)
        monkeypatch.setattr(RunningBatch, "_next_rows", some_join)
        monkeypatch.setattr(RunningBatch, "iterate", preempt)


@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, NUM_TESTS))],
)
def test_random_schedules_write_the_same_tokens(make_solver, monkeypatch, seed, pytestconfig):
    """Rows join, leave and come back after any token, in any company, and in every second schedule
    a step may be begun before the host has read the last one; the last two tests' rows have states
    that know of which token they are.

    `pytest tests/engine/test_running.py --schedules 1000` compares more of them.
    """
    num_schedules = pytestconfig.getoption("--schedules") // NUM_TESTS
    attention = ("tree", "dense", "tree", "reference")[seed % 4] if seed < 8 else "tree"
    if seed >= 8:
        monkeypatch.setattr("beamwright.solver.machinery.load_model", load_recurring)
    tight = seed % 2 == 0
    options = {**SMALL, "dtype": exact_dtype(attention), "attention": attention}
    options["batching"] = ("continuous", "grouped")[seed >= 6]
    expected = facts(grow(make_solver(**options))[1])
    where = {"schedule": "locality", "host_memory": "1MiB"} if tight else {"schedule": "in-gpu"}
    if tight:
        where["kv_memory"] = 20 * 4096 * (2 if options["dtype"] == "float64" else 1)
    with make_solver(**options, **where) as solver:
        chaos = Chaos(monkeypatch, evicts=tight)
        for number in range(num_schedules):
            chaos.rng.seed(f"{seed} {number}")
            if number % 2:
                put_late(solver)
            else:
                solver._machinery.batch._rows.replay = Replay()
            seen = []
            solver.solve(PROBLEM, on_round=lambda report, seen=seen: seen.append(report.tree))
            assert facts(seen[-1]) == expected
            assert_nothing_allocated(solver)
    assert not tight or chaos.num_preempted > num_schedules
    assert (chaos.num_begun > num_schedules) == (seed < 8)
