from dataclasses import replace

import pytest

from beamwright.schedule.forest import Forest
from beamwright.schedule.ranges import plan_ranges
from schedule.forests import (
    allowed,
    contiguous,
    demand_of,
    least_loaded,
    loaded_bytes,
    random_demand,
    slow_need,
)


def plan(demand, **options):
    return [list(group) for group in plan_ranges(Forest(demand), **options)]


def test_the_sweep_begins_where_the_last_one_ended():
    paths = ["a", "b", "c", "d"]
    left = demand_of(paths, capacity=22, resident=("a", "b"))
    right = demand_of(paths, capacity=22, resident=("c", "d"))
    assert plan(left) == [[0, 1], [2, 3]]
    assert plan(right) == [[2, 3], [0, 1]]
    assert plan(right, balance=False) == [[2, 3], [0, 1]]


def test_begins_inside_where_the_resident_beams_are():
    paths = list("abcdefghijkl")
    demand = demand_of(paths, growth=0, capacity=40, resident=tuple("efgh"))
    assert plan(demand)[0] == [4, 5, 6, 7]
    assert loaded_bytes(demand, plan(demand)) == 80


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("balance", [False, True])
def test_never_more_groups_than_any_contiguous_cut(copies, balance):
    for seed in range(120):
        demand = random_demand(seed, num_beams=2 + seed % 8, copies=copies)
        max_batch = None if seed % 3 else 3
        groups = plan(demand, balance=balance, max_batch=max_batch)
        assert sorted(beam for group in groups for beam in group) == list(range(2 + seed % 8))
        assert all(allowed(demand, group, max_batch) for group in groups)
        assert len(groups) == len(contiguous(demand, max_batch)[0])


@pytest.mark.parametrize(
    ("copies", "scattered"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_loads_are_close_to_the_best_of_all_cuts_and_orders(copies, scattered):
    ours = best = 0
    for seed in range(120):
        demand = random_demand(seed, num_beams=2 + seed % 7, copies=copies, scattered=scattered)
        cuts = contiguous(demand)
        if len(cuts[0]) > 4:
            continue
        loaded, least = loaded_bytes(demand, plan(demand)), least_loaded(demand, cuts)
        assert loaded <= least + max(demand.segment_bytes)
        ours, best = ours + loaded, best + least
    assert ours <= 1.01 * best


def test_the_largest_group_is_the_smallest_possible_when_nothing_is_resident():
    for seed in range(120):
        demand = random_demand(seed, num_beams=9, copies=seed % 2 == 1)
        demand = replace(demand, resident=[0] * len(demand.parent))
        largest = max(slow_need(demand, group) for group in plan(demand))
        cuts = contiguous(demand)
        best = min(max(slow_need(demand, group) for group in groups) for groups in cuts)
        assert largest == best
