"""Drafts as an input of the simulator, and graphs: what they make of a pass's time."""

import pytest

from beamwright.plan.costs import Layout, Roofline
from beamwright.plan.machines import captured
from beamwright_lab.simulator.costs import DraftedCosts, Drafts, RooflineCosts
from beamwright_lab.simulator.engines import EngineCase, simulate_engine
from simulated import CARD, GIB, MODEL, TREE

PLAIN = RooflineCosts(Roofline(MODEL, CARD), Layout.TREE)
DRAFTED = DraftedCosts(PLAIN.roofline, Layout.TREE, Drafts(accepted=0.5, drafted=2.0))


def seconds(costs, num_rows):
    return costs.tokens(num_rows, num_rows * 100, num_rows * 100, num_rows, 16).seconds


def test_where_weights_are_the_limit_a_token_takes_its_share_of_a_pass():
    assert seconds(DRAFTED, 8) == pytest.approx(seconds(PLAIN, 8) / 1.5)


def test_where_arithmetic_is_the_limit_nothing_is_drafted():
    assert seconds(DRAFTED, 512) == seconds(PLAIN, 512)


def test_between_them_some_rows_get_drafts():
    assert seconds(PLAIN, 64) / 1.5 < seconds(DRAFTED, 64) < seconds(PLAIN, 64)


@pytest.mark.parametrize("name", ["vllm-offload", "sglang-hicache"])
def test_an_engine_with_drafts_is_faster_by_at_most_what_is_accepted(name):
    plain, drafted = (
        simulate_engine(EngineCase(TREE, MODEL, CARD, GIB // 2, drafts), name)[1]
        for drafts in (None, Drafts(0.5, 2.0))
    )
    assert plain.time_s / 1.5 < drafted.time_s < plain.time_s
    assert drafted.stall_s >= 0


def test_a_replayed_graph_has_shorter_launches_and_the_same_passes():
    fast = RooflineCosts(Roofline(MODEL, captured(CARD)), Layout.TREE)
    eager, replayed = (c.decode_ops_per_layer * c.launch_s for c in (CARD, captured(CARD)))
    spared = 16 * MODEL.num_layers * (eager - replayed)
    assert seconds(PLAIN, 8) - seconds(fast, 8) == pytest.approx(spared)
