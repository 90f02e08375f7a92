import random
from itertools import pairwise, permutations

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Plan, ScheduleView
from beamwright.schedule import make_schedule
from beamwright.schedule.prefix_order import (
    PREFIX_ORDERS,
    cut,
    nearest,
    node_forest,
    ordered,
    siblings_together,
    trie,
)
from beamwright.sections import ScheduleSettings
from beamwright.tree import NodeState
from fakes import new_tree
from schedule.forests import demand_of, random_demand, slow_need

PATHS = ["pa", "pa", "pb1", "pb1", "pb2", "pc"]
APART = [0, 2, 4, 5, 1, 3]  # survivors replicated in turn
SEEDS = range(60)


def eviction_cost(demand, groups):
    """The paper's: sum over i of Nodes(T_i) - P(T_i, T_{i+1}), what each next group evicts."""
    tries = [trie(demand, group) for group in groups]
    return sum(len(before - after) for before, after in pairwise(tries))


def shared_prefixes(nodes, order):
    """Score(S) of Appendix A.2: the sum of P(c_k, c_{k+1}), every beam a batch of its own."""
    return sum(nodes.common_bytes(min(pair), max(pair)) for pair in pairwise(order))


def forest(paths=PATHS):
    return node_forest(demand_of(paths))


def is_depth_first(demand, order):
    """Every node's beams follow each other."""
    for node in range(len(demand.parent)):
        places = [k for k, beam in enumerate(order) if node in trie(demand, [beam])]
        if places and places[-1] - places[0] >= len(places):
            return False
    return True


def shuffled(seed, demand):
    beams = list(range(len(demand.leaf)))
    random.Random(seed).shuffle(beams)
    return beams


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("greedy", [0, 1, 2, 3, 4, 5]),
        ("siblings", [0, 1, 2, 3, 4, 5]),
        ("depth-first", [0, 1, 2, 3, 4, 5]),
        ("worst", [0, 2, 5, 4, 1, 3]),
    ],
)
def test_orders_of_a_small_tree(name, wanted):
    assert ordered(name, forest(), APART) == wanted


def test_greedy_follows_what_shares_most_and_then_who_came_first():
    assert nearest(forest(), [3, 5, 0, 4, 1, 2]) == [3, 2, 4, 5, 0, 1]


def test_siblings_keep_the_parents_order_even_where_cousins_are_apart():
    """b1, a, b2: parents in an order that is not depth-first stay in it."""
    assert siblings_together(forest(), [3, 0, 4, 1, 2, 5]) == [3, 2, 0, 1, 4, 5]


def test_a_random_order_has_a_seed():
    orders = [ordered("random", forest(), APART, seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(6)) for order in orders)


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_is_depth_first_and_shares_most(seed):
    demand = random_demand(seed, num_beams=6)
    nodes = node_forest(demand)
    greedy = nearest(nodes, shuffled(seed, demand))
    scores = {order: shared_prefixes(nodes, order) for order in permutations(range(6))}
    assert scores[tuple(greedy)] == max(scores.values())
    assert is_depth_first(demand, greedy)
    for order, score in scores.items():
        assert (score == max(scores.values())) == is_depth_first(demand, order)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_score_is_what_single_beams_do_not_evict(seed):
    demand = random_demand(seed, num_beams=9)
    nodes, order = node_forest(demand), shuffled(seed, demand)
    paths = sum(nodes.path_bytes[beam] for beam in order[:-1])
    cost = eviction_cost(demand, [[beam] for beam in order])
    assert cost == paths - shared_prefixes(nodes, order)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_the_largest_runs_that_fit(seed, copies):
    demand = random_demand(seed, num_beams=12, copies=copies)
    order = shuffled(seed, demand)
    for most in (None, 3):
        groups = cut(demand, order, most)
        assert [beam for group in groups for beam in group] == order
        for group, after in zip(groups, [*groups[1:], None], strict=True):
            assert len(group) == 1 or slow_need(demand, group) <= demand.capacity_bytes
            assert len(group) <= (most or 12)
            if after is not None and len(group) != most:
                assert slow_need(demand, [*group, after[0]]) > demand.capacity_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_a_depth_first_order_loads_every_node_once(seed):
    """Sum of Nodes(T_i) - P(T_i, T_{i+1}) and the last T_i: what is loaded where nothing else is
    kept, which is the union in a depth-first order and no less in any other."""
    demand = random_demand(seed, num_beams=12, fraction=0.3)
    union = len(trie(demand, range(12)))
    for name in PREFIX_ORDERS:
        order = ordered(name, node_forest(demand), shuffled(seed, demand))
        groups = cut(demand, order)
        loaded = eviction_cost(demand, groups) + len(trie(demand, groups[-1]))
        assert loaded >= union
        if is_depth_first(demand, order):
            assert loaded == union


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


@pytest.mark.parametrize(
    ("order", "groups"),
    [
        ("greedy", [[0, 1, 2], [3, 4, 5]]),
        ("siblings", [[0, 1, 2], [3, 4, 5]]),
        ("depth-first", [[0, 1, 2], [3, 4, 5]]),
        ("worst", [[0, 2], [4, 1], [3, 5]]),
    ],
)
def test_the_schedule_cuts_its_order_where_the_device_is_full(beams, order, groups):
    kv = demand_of(["pa", "pa", "pb", "pb", "pc", "pc"], growth=5, capacity=45)
    assert planned(beams, kv, order=order) == (groups, True)


def test_limits_and_what_fits(beams):
    kv = demand_of(["pa", "pa", "pb", "pb", "pc", "pc"], growth=5)
    assert planned(beams, kv) == ([[0, 1, 2, 3, 4, 5]], False)
    assert planned(beams, kv, max_batch=4)[0] == [[0, 1, 2, 3], [4, 5]]
    schedule = make_schedule(ScheduleSettings(schedule="prefix"))
    assert schedule.name == "prefix"
    assert schedule.plan(ScheduleView(beams)) == Plan((beams,))
    assert schedule.plan(ScheduleView((), demand_of([]))) == Plan(())


def test_an_unknown_order_is_an_error():
    with pytest.raises(InputError, match="order"):
        make_schedule(ScheduleSettings.model_validate({"schedule": "prefix", "order": "best"}))
