"""What the benchmarks of FlashTTS's order count, on trees small enough to count by hand."""

from itertools import combinations

import pytest

from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.schedule.forest import Forest
from beamwright.schedule.prefix_order import node_forest
from beamwright.tree import NodeState, RecordedNode, RecordedTree, StopReason
from beamwright_lab.flashtts.order import Case, evictions
from beamwright_lab.flashtts.swap_argument import (
    Proof,
    batches,
    demand_of,
    depth_first,
    greedy_schedules,
    score,
    shapes,
    shared,
    terms,
)

PAIR_AND_ONE = (((), ()), ())


def test_every_shape_is_there_once():
    """Series-reduced rooted trees (OEIS A000669)."""
    assert [len(shapes(leaves)) for leaves in range(1, 8)] == [1, 1, 2, 5, 12, 33, 90]
    assert len(set(shapes(7))) == 90


def test_depth_first_orders_keep_a_pair_together():
    demand = demand_of(PAIR_AND_ONE)
    assert depth_first(demand) == {(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)}
    assert set(greedy_schedules(shared(node_forest(demand)))) == depth_first(demand)


@pytest.mark.parametrize("shape", shapes(5))
def test_the_four_terms_are_the_change_of_the_score(shape):
    common = shared(Forest(demand_of(shape)))
    order = (3, 0, 4, 1, 2)
    for i, j in combinations(range(5), 2):
        if j > i + 1:
            swapped = list(order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            change = score(common, tuple(swapped)) - score(common, order)
            assert sum(terms(common, order, i, j)) == change


def test_two_terms_of_the_smallest_tree_are_positive():
    demand = demand_of(PAIR_AND_ONE)
    proof = Proof()
    proof.add(shared(node_forest(demand)), "", depth_first(demand))
    row = proof.row("nodes", 3)
    assert (row["greedy schedules"], row["optimal"], row["best orders"]) == (4, 4, 4)
    assert [row[f"{name} > 0"] for name in ("A", "B", "C", "D", "delta")] == [0, 2, 2, 0, 0]


def test_with_several_to_a_batch_depth_first_orders_load_least():
    rows, examples = batches(4, seed=0)
    by_loads = [row for row in rows if row["by"] == "loaded"]
    assert by_loads
    assert all(row["all depth-first best"] == row["trees x capacities"] for row in by_loads)
    assert (examples["cost"]["depth-first"], examples["cost"]["best"]) == (3, 2)


def recorded():
    """Two survivors with two children each, steps of two blocks, a prompt of one."""
    lineages = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    nodes = [
        RecordedNode(lineage, 2 * BLOCK_TOKENS, StopReason.STEP_LENGTH, NodeState.KEPT, 0.5)
        for lineage in lineages
    ]
    return RecordedTree(0, BLOCK_TOKENS, 2, tuple(nodes))


def test_a_case_is_the_last_iteration():
    case = Case.of("two", recorded(), None, 4)
    demand = case.demand()
    block = demand.segment_bytes[0]
    assert (demand.parent, demand.leaf) == ([None, 0, 0], [1, 1, 2, 2])
    assert demand.segment_bytes == [block, 2 * block, 2 * block]
    assert demand.growth_bytes == [2 * block] * 4
    assert case.in_turn() == [0, 2, 1, 3]
    # 7 of 13 blocks: a parent with both children.
    rows = {row["order"]: row for row in evictions(case, [0.54])}
    assert (rows["greedy"]["batches"], rows["greedy"]["loaded / union"]) == (2, 1.0)
    assert (rows["in turn"]["batches"], rows["in turn"]["cost, nodes"]) == (4, 3)
