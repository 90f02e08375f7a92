from dataclasses import replace

import pytest

from beamwright.errors import CapacityError
from beamwright.plan.costs import Layout
from beamwright_lab.simulator.costs import RooflineCosts, Work
from beamwright_lab.simulator.lanes import RunningWork, SharedClock
from beamwright_lab.simulator.many import simulate_many
from simulated import COSTS, GIB, many, replayed, steps_of, trees

TREES = trees(6)


class Beside:
    """A lane with one piece of work."""

    def __init__(self, work):
        self._piece = RunningWork(work, work.seconds, 0)

    def piece(self):
        return self._piece if self._piece.left_s > 0 else None


def cases(overlap=True, budget=64 * GIB, schedule="in-gpu", speculation="off", **verifier):
    """verifier: of its case."""
    beside = {"speculation": speculation, "overlap": overlap}
    return many(TREES, budget, {"schedule": schedule}, verifier, **beside)


class Counted(RooflineCosts):
    """Adds up what is done. total: seconds alone, of memory, of compute."""

    total = (0.0, 0.0, 0.0)

    def _passes(self, *args):
        work = super()._passes(*args)
        more = work.seconds, work.memory_s, work.compute_s
        Counted.total = tuple(a + b for a, b in zip(Counted.total, more, strict=True))
        return work


@pytest.mark.parametrize("speculation", ["off", "exact"])
@pytest.mark.parametrize("verifier", [{}, {"copies": 2}, {"copies": 2, "own_cards": True}])
def test_trees_are_what_they_are_alone(speculation, verifier):
    found = simulate_many(cases(speculation=speculation, **verifier), 4)
    assert [steps_of(run.tree) for run in found.runs] == [replayed(tree) for tree in TREES]
    seconds = found.seconds
    assert seconds.both_s > 0
    parts = seconds.decode_s + seconds.verify_s + seconds.both_s + seconds.stall_s
    assert found.time_s == pytest.approx(parts)


def test_two_lanes_are_no_faster_than_the_roofline_of_what_they_do():
    counted = [replace(each, costs=Counted(COSTS.roofline, Layout.TREE)) for each in cases()]
    counted = [replace(e, verifier=replace(e.verifier, costs=counted[0].costs)) for e in counted]
    Counted.total = (0.0, 0.0, 0.0)
    beside = simulate_many(counted, 4)
    alone_s, memory_s, compute_s = Counted.total
    assert max(memory_s, compute_s) < beside.time_s < alone_s
    own = simulate_many(cases(own_cards=True), 4)
    assert own.time_s < beside.time_s


def test_what_does_not_fit_and_what_is_offloaded():
    with pytest.raises(CapacityError):
        simulate_many(cases(budget=GIB // 16), 4)
    found = simulate_many(cases(budget=GIB // 2, schedule="locality"), 4)
    assert [steps_of(run.tree) for run in found.runs] == [replayed(tree) for tree in TREES]
    assert found.h2d_bytes > 0


@pytest.mark.parametrize(
    ("one", "other", "both_s"),
    [
        (Work(1.0, 1.0, 0.2), Work(1.0, 0.3, 0.7), 1.3),  # memory is short
        (Work(1.0, 0.5, 0.1), Work(1.0, 0.2, 0.8), 1.0),  # launches leave room
        (Work.alone(1.0), Work.alone(1.0), 2.0),
        (Work(1.0, 1.0, 0.0), Work(3.0, 0.0, 3.0), 3.0),
    ],
)
def test_how_two_share_a_device(one, other, both_s):
    clock = SharedClock()
    lane = Beside(other)
    clock.lanes = [lane]
    clock.run(one)
    clock.until(lambda: False)
    assert clock.now_s == pytest.approx(both_s)
    assert clock.both_s + clock.beside_s == pytest.approx(both_s)
