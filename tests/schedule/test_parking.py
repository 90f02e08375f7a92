"""Groups or parking: which is expected to be faster, and how rows park."""

from dataclasses import replace

import pytest

from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand, Parking, ScheduleView
from beamwright.schedule import make_schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.locality import choose_parking
from beamwright.sections import ScheduleSettings
from beamwright.tree import SearchTree

WEIGHTS = PassCosts(weights_s=1.0)
ARITHMETIC = PassCosts(weights_s=0.0, row_s=1.0)


def view_of(num_beams, capacity, costs=WEIGHTS, *, fixed=True):
    """Beams of one prompt of 10 bytes whose steps write 10 each."""
    tree = SearchTree(0, (1,), "")
    demand = KVDemand([None], [10], [0], [0] * num_beams, [10] * num_beams, capacity)
    return ScheduleView(tuple(tree.expand(tree.root, num_beams)), demand, None, 10, fixed, costs)


def plan(view, **settings):
    return make_schedule(ScheduleSettings(schedule="locality", **settings)).plan(view)


@pytest.mark.parametrize(
    ("capacity", "costs", "parks"),
    [
        (1290, WEIGHTS, False),  # all fits
        (640, WEIGHTS, True),  # half: every pass reads all weights, and fewer passes are enough
        (640, ARITHMETIC, False),  # as many rows in all as in groups, and some KV more comes back
        (640, replace(WEIGHTS, link_bandwidth=1.0), False),  # where that takes long
    ],
)
def test_the_cheaper_is_taken(capacity, costs, parks):
    costs = replace(costs, link_bandwidth=min(costs.link_bandwidth, 1e9))
    found = plan(view_of(128, capacity, costs))
    assert (found.parking is not None) is parks
    assert found.eager or not parks


def test_what_was_asked_for_is_done():
    view = view_of(16, 90)
    assert plan(view, batching="grouped").parking is None
    assert plan(view, batching="continuous").parking is not None
    assert plan(replace(view, fixed_lengths=False)).parking is not None  # so no barriers
    copies = replace(view.demand, copy_per_beam=True)
    assert plan(replace(view, demand=copies), batching="continuous").parking is None
    assert plan(view_of(16, 1000), batching="continuous").parking is None  # nothing has to leave


@pytest.mark.parametrize(
    ("num_beams", "weights_s", "byte_s", "capacity", "most_rows"),
    [
        *((256, 110.0, 0.0, 2100, 128), (256, 300.0, 0.0, 2100, 256), (300, 100.0, 0.0, 2100, 100)),
        *((64, 1.0, 0.0, 2100, 64), (128, 1.0, 0.0, 2100, 64)),
        (256, 110.0, 0.2, 2100, 256),  # as KV takes as long to read
        (256, 110.0, 0.0, 500, None),  # half of them would park as well
    ],
)
def test_rows_go_in_even_waves_of_what_arithmetic_has_room_for(
    num_beams, weights_s, byte_s, capacity, most_rows
):
    costs = PassCosts(weights_s=weights_s, row_s=1.0, byte_s=byte_s)
    view = view_of(num_beams, capacity, costs)
    assert choose_parking(view, Forest(view.demand)).most_rows == most_rows


def test_the_last_rows_are_those_that_the_device_holds_a_few_times():
    view = view_of(16, 40)
    # 2.5 * 40 bytes
    assert choose_parking(view, Forest(view.demand)) == Parking(None, level_from=9)
