import pytest

from beamwright.schedule.algorithm_one import capacity_beams, make_beam_sets
from beamwright.schedule.forest import Forest
from beamwright.schedule.ranges import plan_ranges
from schedule.forests import GROUP_SIZES, allowed, demand_of, paths_of, random_demand, sizes

FIGURE_8 = ["pa1", "pa1", "pa2", "pb3", "pb3", "pb4"]  # six beams, two early branches


PLANNERS = pytest.mark.parametrize("groups_of", [make_beam_sets, plan_ranges])


@PLANNERS
@pytest.mark.parametrize(("num_beams", "capacity", "balance", "wanted"), GROUP_SIZES)
def test_group_sizes_of_the_paper_and_the_slides(groups_of, num_beams, capacity, balance, wanted):
    paths = [chr(ord("a") + beam) for beam in range(num_beams)]
    forest = Forest(demand_of(paths, growth=5, capacity=capacity * 15 + 3, copies=True))
    assert capacity_beams(forest) == capacity
    assert sizes(groups_of(forest, balance=balance)) == wanted


@PLANNERS
def test_figure_8_groups_beams_with_common_prefixes(groups_of):
    demand = demand_of(FIGURE_8, growth=0, capacity=90, copies=True)
    assert [list(group) for group in groups_of(Forest(demand))] == [[0, 1, 2], [3, 4, 5]]


def test_overlap_counts_wherever_the_beam_is():
    demand = demand_of(["pa1", "pa2", "pb", "qc", "qd"], growth=0, capacity=90, copies=True)
    assert make_beam_sets(Forest(demand)) == [[0, 1], [2, 3, 4]]
    assert make_beam_sets(Forest(demand), balance=False) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("by_arrival", [False, True])
def test_groups_fit_and_hold_every_beam_once(by_arrival):
    for seed in range(120):
        demand = random_demand(seed, num_beams=10, copies=seed % 2 == 1)
        arrival = list(range(9, -1, -1)) if by_arrival else None
        groups = make_beam_sets(Forest(demand), balance=seed % 3 > 0, arrival=arrival)
        assert sorted(beam for group in groups for beam in group) == list(range(10))
        assert all(allowed(demand, group) for group in groups)


def test_every_choice_has_the_largest_overlap():
    for seed in range(60):
        demand = random_demand(seed, num_beams=10, copies=seed % 2 == 1)
        paths, unused = paths_of(demand), set(range(10))
        for group in make_beam_sets(Forest(demand)):
            union = set()
            for beam in group:
                best = max(gain(demand, paths[other], union) for other in unused)
                assert gain(demand, paths[beam], union) == best
                union |= paths[beam]
                unused.remove(beam)


def gain(demand, path, union):
    return sum(demand.segment_bytes[segment] for segment in path & union)
