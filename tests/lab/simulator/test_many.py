"""Several trees at a time, one verifier in turn or beside: each tree as it is alone."""

from dataclasses import replace

import pytest

from beamwright.errors import CapacityError
from beamwright.sections import StepSettings
from beamwright.tree.recording import record_tree
from beamwright_lab.simulator.costs import Work
from beamwright_lab.simulator.lanes import RunningWork, SharedClock
from beamwright_lab.simulator.many import simulate_many
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from simulated import GIB, MODEL, case

SEARCH = SyntheticSearch(8, 2, 64, 256, 32, step_sigma=0.7, survival="score")
TREES = [grow(replace(SEARCH, seed=seed), problem_id=seed) for seed in range(4)]
STEP = StepSettings(max_step_tokens=256, max_tokens=256)


def cases(budget=64 * GIB, verifier=None, **options):
    """A case for each tree, with a verifier. verifier: what is said of it beside its bytes."""
    given = {"schedule": "in-gpu", "scorer": (MODEL, budget, verifier or {}), "step": STEP}
    return [case(budget=budget, tree=tree, **{**given, **options}) for tree in TREES]


def whole(found):
    """The outcome, whose trees are those that were replayed."""
    for run, tree in zip(found.runs, TREES, strict=True):
        nodes = record_tree(run.tree)["nodes"]
        grown = [(tuple(node["lineage"]), node["tokens"], node["state"]) for node in nodes]
        assert grown == [(node.lineage, node.tokens, str(node.state)) for node in tree.nodes]
    assert found.tokens == sum(node.tokens for tree in TREES for node in tree.nodes)
    seconds = found.seconds
    parts = seconds.decode_s + seconds.verify_s + seconds.both_s + seconds.stall_s
    assert found.time_s == pytest.approx(parts)
    return found


@pytest.mark.parametrize("speculation", ["off", "exact"])
@pytest.mark.parametrize(
    ("overlap", "budget", "verifier"),
    [
        (False, 64 * GIB, {}),
        (False, GIB // 2, {}),
        (True, 64 * GIB, {}),
        (True, GIB // 2, {}),
        (True, 64 * GIB, {"copies": 2}),
        (True, 64 * GIB, {"copies": 2, "own_cards": True}),
    ],
)
def test_trees_are_what_they_are_alone(speculation, overlap, budget, verifier):
    schedule = "in-gpu" if budget > GIB else "locality"
    beside = {"speculation": speculation, "overlap": overlap}
    found = whole(simulate_many(cases(budget, verifier, schedule=schedule, **beside), 4))
    assert (found.seconds.both_s > 0) == overlap
    assert (found.h2d_bytes > 0) == (budget < GIB)
    assert (found.speculated_tokens > 0) == (speculation == "exact")
    assert found.device_peak_bytes <= budget


def test_what_does_not_fit_is_said():
    with pytest.raises(CapacityError):
        simulate_many(cases(budget=GIB // 16, overlap=True), 4)


def test_together_they_are_faster_and_each_is_slower():
    alone, two, four = (simulate_many(cases(), in_flight) for in_flight in (1, 2, 4))
    assert four.time_s < two.time_s < alone.time_s
    assert four.mean_rows > two.mean_rows > alone.mean_rows
    assert four.mean_s > two.mean_s > alone.mean_s
    assert four.begun_s == 0 < two.begun_s < alone.begun_s
    assert four.problems_per_minute == pytest.approx(4 * 60 / four.time_s)
    num_steps, num_rounds = sum(len(tree.nodes) for tree in TREES), sum(t.rounds for t in TREES)
    assert alone.steps_per_call == pytest.approx(num_steps / num_rounds)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_decoded_ahead_is_scored_ahead_where_that_is_asked_for(overlap):
    """The same trees, and other instants."""
    options = {"speculation": "exact", "overlap": overlap}
    never, slack = (
        whole(simulate_many(cases(verify_ahead=ahead, **options), 4))
        for ahead in ("never", "slack")
    )
    assert never.time_s != slack.time_s


@pytest.mark.parametrize("overlap", [False, True])
def test_exploring_in_lockstep_and_decoupled(overlap):
    """Steps of several are scored together, and with in_flight None all fit."""

    def explore(how, in_flight=None):
        return whole(simulate_many(cases(explore=how, overlap=overlap), in_flight))

    lockstep, continuous, decoupled = map(explore, ("lockstep", "continuous", "decoupled"))
    assert lockstep.begun_s == continuous.begun_s == decoupled.begun_s == 0
    assert lockstep.steps_per_call > decoupled.steps_per_call >= continuous.steps_per_call
    first, second, third, _ = explore("lockstep", 2).runs
    assert first.started_s == second.started_s == 0
    assert third.started_s == max(first.ended_s, second.ended_s)


# --- two lanes -------------------------------------------------------------------------------


def test_cards_of_their_own_are_faster_than_one():
    beside, own = (
        simulate_many(cases(verifier={"own_cards": own_cards}, overlap=True), 4)
        for own_cards in (False, True)
    )
    assert own.time_s < beside.time_s


class Beside:
    """A lane with one piece of work."""

    def __init__(self, work):
        self._piece = RunningWork(work, work.seconds, 0)

    def current_work(self):
        return self._piece if self._piece.left_s > 0 else None


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
    clock.lanes = [Beside(other)]
    clock.run(one)
    clock.run_until(lambda: False)
    assert clock.now_s == pytest.approx(both_s)
    assert clock.both_s + clock.beside_s == pytest.approx(both_s)
