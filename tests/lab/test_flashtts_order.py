import random
from itertools import pairwise, permutations

import pytest

from beamwright.protocols import Plan, ScheduleView
from beamwright.schedule import make_schedule
from beamwright.sections import ScheduleSettings
from beamwright.tree import NodeState
from beamwright_lab.flashtts.order import PrefixSchedule, cut_groups
from fakes import new_tree
from schedule.forests import demand_of, paths_of, random_demand, slow_need

PATHS = ["pa", "pa", "pb1", "pb1", "pb2", "pc"]
SEEDS = range(20)


def ordered(demand, arrival):
    return PrefixSchedule().order(demand, arrival)


def shuffled(seed, demand):
    beams = list(range(len(demand.leaf)))
    random.Random(seed).shuffle(beams)
    return beams


@pytest.mark.parametrize(
    ("arrival", "wanted"),
    [([0, 2, 4, 5, 1, 3], [0, 1, 2, 3, 4, 5]), ([3, 5, 0, 4, 1, 2], [3, 2, 4, 5, 0, 1])],
)
def test_it_follows_what_shares_most_and_then_who_came_first(arrival, wanted):
    assert ordered(demand_of(PATHS), arrival) == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_shares_more(seed):
    """Score(S) of Appendix A.2: the sum of P(c_k, c_{k+1}), every beam a batch of its own."""
    demand = random_demand(seed, num_beams=6)
    paths = paths_of(demand)

    def score(order):
        return sum(len(paths[one] & paths[other]) for one, other in pairwise(order))

    best = max(map(score, permutations(range(6))))
    assert score(ordered(demand, shuffled(seed, demand))) == best


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_the_largest_runs_that_fit(seed, copies):
    demand = random_demand(seed, num_beams=12, copies=copies)
    order = shuffled(seed, demand)
    for most in (None, 3):
        groups = cut_groups(demand, order, most)
        assert [beam for group in groups for beam in group] == order
        for group, after in zip(groups, [*groups[1:], None], strict=True):
            assert len(group) == 1 or slow_need(demand, group) <= demand.capacity_bytes
            assert len(group) <= (most or 12)
            if after is not None and len(group) != most:
                assert slow_need(demand, [*group, after[0]]) > demand.capacity_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_every_node_is_loaded_once(seed):
    """Each group loads what the one before it has not: in all, the union."""
    demand = random_demand(seed, num_beams=12, fraction=0.3)
    paths = paths_of(demand)
    groups = cut_groups(demand, ordered(demand, shuffled(seed, demand)))
    read = [set().union(*(paths[beam] for beam in group)) for group in groups]
    loaded = sum(len(after - before) for before, after in pairwise([set(), *read]))
    assert loaded == len(set().union(*paths))


# --- the schedule ----------------------------------------------------------------------------


@pytest.fixture
def beams():
    """Three survivors with two children each."""
    tree = new_tree()
    found = []
    for node in tree.expand(tree.root, 3):
        node.state = NodeState.KEPT
        found += tree.expand(node, 2)
    return tuple(found)


def planned(beams, kv, **options):
    settings = ScheduleSettings.model_validate({"schedule": "prefix", **options})
    plan = make_schedule(settings).plan(ScheduleView(beams, kv))
    return [[beams.index(node) for node in group] for group in plan.groups], plan.write_back


def test_the_schedule_cuts_its_order_where_the_device_is_full_and_at_limits(beams):
    paths = ["pa", "pa", "pb", "pb", "pc", "pc"]
    kv = demand_of(paths, growth=5, capacity=45)
    assert planned(beams, kv) == ([[0, 1, 2], [3, 4, 5]], True)
    kv = demand_of(paths, growth=5)
    assert planned(beams, kv) == ([[0, 1, 2, 3, 4, 5]], False)
    assert planned(beams, kv, max_batch=4)[0] == [[0, 1, 2, 3], [4, 5]]
    schedule = make_schedule(ScheduleSettings(schedule="prefix"))
    assert schedule.name == "prefix"
    assert schedule.plan(ScheduleView(beams)) == Plan((beams,))
    assert schedule.plan(ScheduleView((), demand_of([]))) == Plan(())
