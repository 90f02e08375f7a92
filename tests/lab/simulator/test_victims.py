"""Whose KV leaves first, in the orders that the engine does not have."""

import pytest

from beamwright.kv.link import Link
from beamwright.kv.pool import BlockLedger, ByteBudget, GroupBlocks
from beamwright.kv.segments import Segment
from beamwright_lab.simulator.victims import TIERS, cheapest_order, least_recent_order


def test_least_recent_first_then_the_deepest():
    touch = {"prompt": 3, "step": 3, "leaf": 3, "old": 1}
    start = {"prompt": 0, "step": 10, "leaf": 30, "old": 0}
    assert least_recent_order([*touch], touch, start) == ["old", "leaf", "step", "prompt"]


def test_what_is_not_used_then_what_is_cheapest_to_have_again():
    cost = {"a": 2.0, "b": 1.0, "c": 1.5, "d": 1.5, "e": 0.5}
    assert cheapest_order([*"abdc"], {}, cost) == [*"bdca"]
    assert cheapest_order([*"abcde"], {"e": 1}, cost) == [*"bcdae"]


@pytest.mark.parametrize(
    ("victims", "recompute", "leaves"),
    [("tree", False, 0), ("lru", False, 1), ("cost", False, 1), ("cost", True, 2)],
)
def test_who_leaves_first(victims, recompute, leaves):
    """A path of three segments, the second of which the host has, and the third ends early."""
    tier = TIERS[victims](BlockLedger(8, 4, ByteBudget(64)), Link, recompute)
    segments = [Segment(str(at), start=at, group=GroupBlocks(4)) for at in (0, 8, 4)]
    for tick, (segment, length) in enumerate(zip(segments, (8, 8, 5), strict=True), start=1):
        segment.length, segment.last_use = length, tick
        segment.copies = [[0, 1]]
        if victims == "tree" or segment is segments[1]:
            segment.host_length = length
    if victims == "lru":
        tier.touch(segments, 3)
    assert tier.in_order(segments, {})[0] is segments[leaves]
