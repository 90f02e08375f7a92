"""The floor of a search's seconds, on a tree that is checked by hand."""

from math import inf

import pytest

from beamwright.plan.costs import Layout, Roofline
from beamwright_lab.simulator.engines import FAIR, EngineCase, simulate_engine
from beamwright_lab.simulator.run import simulate
from beamwright_lab.studies.floor import RoundNeeds, floor_s, rounds_of
from simulated import CARD, GIB, MODEL, TREE, case, recorded

#         prompt 10
#        /         \
#     a: 3        b: 2
#    /    \          \
#  aa: 1  ab: 4     ba: 2
HAND = recorded(10, {(0,): 3, (0, 0): 1, (0, 1): 4, (1,): 2, (1, 0): 2})


def test_each_round_needs_what_is_counted_by_hand():
    first, second = rounds_of(HAND)
    # a holds 1 + 2 + 3 of its own, b 1 + 2; the prompt is there while the longer one runs.
    assert first == RoundNeeds(longest=3, drawn=5, seen=(6 + 3) + 3 * 10 + 2 * 10, held=9 + 3 * 10)
    # aa 1, ab 1 + 2 + 3 + 4, ba 1 + 2; above them prompt and a four times, b twice.
    assert second == RoundNeeds(
        longest=4, drawn=7, seen=14 + (1 + 4) * 13 + 2 * 12, held=14 + 4 * (10 + 3) + 2 * 2
    )


def test_passes_are_those_of_the_longest_step_until_memory_is_short():
    second = list(rounds_of(HAND))[1]
    assert second.held == 70
    assert second.passes(1000) == 4
    assert second.passes(18) == 4
    assert second.passes(17) == 5  # 70 / 17
    assert second.passes(10) == 7


def test_seconds_are_those_of_the_roofline_for_the_mean_pass():
    second, roofline = list(rounds_of(HAND))[1], Roofline(MODEL, CARD)
    memory_s, compute_s, launch_s = roofline.pass_parts_s(1, 10, second.seen / 7, Layout.TREE)
    assert memory_s > compute_s
    assert second.seconds(roofline, 10) == pytest.approx(7 * (memory_s + launch_s))


@pytest.mark.parametrize("budget", [8 * GIB, GIB // 2])
def test_nobody_is_faster_and_where_all_fits_this_engine_is_as_fast(budget):
    least = floor_s(TREE, Roofline(MODEL, CARD), budget)
    ours = simulate(case(budget=budget)).time_s
    rivals = [
        simulate_engine(EngineCase(TREE, MODEL, CARD, budget), name)[1].time_s for name in FAIR
    ]
    assert least <= min(ours, *rivals)
    assert ours <= (1.01 if budget > GIB else inf) * least
