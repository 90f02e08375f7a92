import pytest

from beamwright.plan.workload import Spread, Workload, expected_search, sampled_searches, tree_steps
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow


def grown_peak(seed, work):
    """Most distinct nodes above the beams of any round of a search by the real strategy."""
    search = SyntheticSearch(
        work.num_beams,
        work.width,
        work.prompt_tokens,
        work.generate_tokens,
        work.step_tokens,
        seed=seed,
    )
    leaves = {}
    for node in grow(search).nodes:
        leaves.setdefault(len(node.lineage), []).append(node.lineage)
    return max(
        len({leaf[:depth] for leaf in level for depth in range(1, number)})
        for number, level in leaves.items()
    )


@pytest.mark.parametrize(("num_beams", "width"), [(16, 4), (32, 2)])
def test_searches_of_the_real_strategy_lie_within_the_spread(num_beams, width):
    work = Workload(num_beams, width, 64, 384, 32)
    spread = Spread.of(sampled_searches(work).shared.max(axis=1))
    peaks = [grown_peak(seed, work) for seed in range(12)]
    assert all(spread.least <= peak <= spread.worst for peak in peaks)
    assert sum(peaks) / len(peaks) == pytest.approx(spread.mean, rel=0.1)


def test_the_mean_is_the_expectation():
    work = Workload(64, 2, 128, 640, 32)
    sampled = sampled_searches(work).shared.mean(axis=0)
    assert sampled == pytest.approx(expected_search(work).shared[0], rel=0.06)
    assert expected_search(work).shared[0, -1] == round([*tree_steps(work)][-1].num_nodes)


def test_whole_blocks_are_held():
    # One survivor a step: nothing is left to chance. The last step, of 10, needs less.
    work = Workload(4, 4, 20, 50, 20)
    held = sampled_searches(work).held_tokens(work, copies=False)
    assert held == Spread.exactly(24 + 24 + 4 * 24)
    assert sampled_searches(work).union_tokens(work) == Spread.exactly(20 + 20 + 4 * 20)
    copies = sampled_searches(work).held_tokens(work, copies=True)
    assert copies == Spread.exactly(4 * (24 + 2 * 24 + 16))


def test_copies_of_pruned_beams_stay_while_the_node_is_read():
    work = Workload(16, 2, 16, 160, 16)
    searches = sampled_searches(work)
    levels = [*range(10)]
    assert (searches.copied >= [16 * level for level in levels]).all()
    assert (searches.copied[:, 2:] > [16 * level for level in levels[2:]]).any()
    assert (searches.copied >= searches.shared).all()


def test_sampling_is_repeatable():
    work = Workload(8, 2, 16, 64, 16)
    assert sampled_searches(work) is sampled_searches(work)
    assert Spread(1, 2, 3).scaled(10) == Spread(10, 20, 30)
