from itertools import pairwise

import pytest

from beamwright_lab.decoupled import throughput
from beamwright_lab.decoupled.throughput import Machine, PassCeiling, Setting, volumes
from beamwright_lab.simulator.many import simulate_many

TREES = throughput.trees(3, beams=4, max_rounds=6)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_run_passes_the_ceiling(overlap):
    machine = Machine.of("rtx-4090")
    setting = Setting(explore="decoupled", overlap=overlap)
    found = simulate_many(machine.cases(TREES, setting))
    ceiling = PassCeiling.of(machine, TREES)
    assert 0 < ceiling.both_s < ceiling.turns_s
    assert found.time_s > (ceiling.both_s if overlap else ceiling.turns_s)
    assert throughput.most_in_flight(found) == 3
    assert max(tree.rounds for tree in TREES) <= 6


def test_the_work_of_a_tree():
    decoded, scored = volumes(TREES[:1])
    steps = [node.tokens for node in TREES[0].nodes]
    assert decoded.tokens == sum(steps)
    assert scored.tokens == sum(steps) + len(steps) + TREES[0].prompt_tokens
    assert decoded.reads < decoded.sees


def test_more_rows_are_faster_by_less_than_their_number():
    rows = throughput.utilisation("rtx-4090")
    for one, other in pairwise(rows):
        assert one["times"] < other["times"] <= 2 * one["times"]


def test_the_more_is_kept_of_what_is_ahead_the_fewer_passes():
    rows = [row for row in throughput.invocations("rtx-4090", TREES) if row["in flight"] == 1]
    rows.sort(key=lambda row: row["kept"])
    passes = [row["passes"] for row in rows]
    assert passes == sorted(passes, reverse=True)
    assert 0 < rows[0]["kept"] < rows[-1]["kept"] == 1
    assert 0.5 < passes[-1] < 1
