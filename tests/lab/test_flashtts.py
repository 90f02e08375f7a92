"""What the benchmarks of FlashTTS's order count, on trees small enough to count by hand."""

from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.tree import NodeState, RecordedNode, RecordedTree, StopReason
from beamwright_lab.flashtts.order import Case, evictions


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
