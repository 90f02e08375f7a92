from dataclasses import replace

import pytest

from beamwright_lab.simulator.many import simulate_many
from simulated import GIB, many, replayed, steps_of, trees

TREES = trees(4)


def cases(schedule="in-gpu", budget=64 * GIB, **options):
    """options: of the schedule."""
    return many(TREES, budget, {"schedule": schedule, **options})


@pytest.mark.parametrize("speculation", ["off", "exact"])
@pytest.mark.parametrize("budget", [64 * GIB, GIB])
def test_trees_are_what_they_are_alone(speculation, budget):
    schedule = "in-gpu" if budget > GIB else "locality"
    together = [replace(each, speculation=speculation) for each in cases(schedule, budget)]
    found = simulate_many(together, 4)
    assert [steps_of(run.tree) for run in found.runs] == [replayed(tree) for tree in TREES]
    assert found.tokens == sum(node.tokens for tree in TREES for node in tree.nodes)
    assert (found.speculated_tokens > 0) == (speculation == "exact")
    assert found.device_peak_bytes <= budget


def test_together_they_are_faster_and_each_is_slower():
    alone, two, four = (simulate_many(cases(), in_flight) for in_flight in (1, 2, 4))
    assert four.time_s < two.time_s < alone.time_s
    assert four.mean_rows > two.mean_rows > alone.mean_rows
    assert four.mean_s > two.mean_s > alone.mean_s
    assert four.begun_s == 0 < two.begun_s < alone.begun_s
    assert four.problems_per_minute == pytest.approx(4 * 60 / four.time_s)
    assert four.time_s == pytest.approx(four.seconds.decode_s + four.seconds.verify_s)
    num_steps, num_rounds = sum(len(tree.nodes) for tree in TREES), sum(t.rounds for t in TREES)
    assert alone.steps_per_call == pytest.approx(num_steps / num_rounds)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_decoded_ahead_is_scored_ahead_where_that_is_asked_for(overlap):
    """The same trees, and other instants."""

    def seconds(verify_ahead):
        found = many(
            TREES,
            64 * GIB,
            {"schedule": "in-gpu", "verify_ahead": verify_ahead},
            speculation="exact",
            overlap=overlap,
        )
        result = simulate_many(found, 4)
        assert [steps_of(run.tree) for run in result.runs] == [replayed(tree) for tree in TREES]
        return result.time_s

    assert seconds("never") != seconds("slack")


@pytest.mark.parametrize("overlap", [False, True])
def test_exploring_in_lockstep_and_decoupled(overlap):
    """The same trees; steps of several are scored together, and with in_flight None all fit."""

    def explore(how, in_flight=None):
        return simulate_many([replace(e, overlap=overlap) for e in cases(explore=how)], in_flight)

    lockstep, continuous, decoupled = map(explore, ("lockstep", "continuous", "decoupled"))
    for found in (lockstep, continuous, decoupled):
        assert [steps_of(run.tree) for run in found.runs] == [replayed(tree) for tree in TREES]
        assert found.begun_s == 0
    assert lockstep.steps_per_call > decoupled.steps_per_call >= continuous.steps_per_call
    two = explore("lockstep", 2)
    first, second, third, _ = two.runs
    assert first.started_s == second.started_s == 0
    assert third.started_s == max(first.ended_s, second.ended_s)
