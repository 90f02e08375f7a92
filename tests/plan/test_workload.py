"""How large a tree becomes: expected, by hand, and against searches that are played."""

import pytest

from beamwright.errors import InputError
from beamwright.plan import workload
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow


def test_ancestors_by_hand():
    # Of 2 parents with 2 children each, 2 random children share a parent in 1 of 3 cases.
    assert workload.expected_ancestors(4, 2, 2) == pytest.approx([2, 5 / 3])
    # Width 1 keeps every family; one survivor has one ancestor per level.
    assert workload.expected_ancestors(8, 1, 3) == [8, 8, 8]
    assert workload.expected_ancestors(4, 4, 3) == [1, 1, 1]


def test_steps_add_up_and_the_last_may_be_short():
    steps = list(workload.tree_steps(workload.Workload(4, 2, 10, 70, 32)))
    assert [step.num_tokens for step in steps] == [32, 32, 6]
    assert [step.path_tokens for step in steps] == [10, 42, 74]
    assert steps[0].union_tokens == 10
    assert steps[1].union_tokens == 10 + 2 * 32


def test_impossible_workloads_are_refused():
    with pytest.raises(InputError, match="--n 6 is not a multiple of --width 4"):
        workload.Workload(6, 4, 1, 1, 1)
    with pytest.raises(InputError, match="step tokens must be positive"):
        workload.Workload(4, 4, 1, 1, 0)


def grown_peak(search):
    """Most distinct nodes above the beams of any round of a search by the real strategy."""
    leaves = {}
    for node in grow(search).nodes:
        leaves.setdefault(len(node.lineage), []).append(node.lineage)
    return max(
        len({leaf[:depth] for leaf in level for depth in range(1, number)})
        for number, level in leaves.items()
    )


@pytest.mark.parametrize(("num_beams", "width"), [(16, 4), (32, 2)])
def test_searches_of_the_real_strategy_lie_within_the_spread(num_beams, width):
    sizes = (num_beams, width, 64, 384, 32)
    work = workload.Workload(*sizes)
    spread = workload.Spread.of(workload.sampled_nodes(work).max(axis=1))
    peaks = [grown_peak(SyntheticSearch(*sizes, seed=seed)) for seed in range(12)]
    assert all(spread.least <= peak <= spread.worst for peak in peaks)
    assert sum(peaks) / len(peaks) == pytest.approx(spread.mean, rel=0.1)


def test_the_mean_is_the_expectation():
    work = workload.Workload(64, 2, 128, 640, 32)
    assert workload.sampled_nodes(work).mean(axis=0) == pytest.approx(
        workload.expected_nodes(work)[0], rel=0.06
    )


def test_whole_blocks_are_held():
    # One survivor a step: nothing is left to chance. The last step, of 10, needs less.
    work = workload.Workload(4, 4, 20, 50, 20)
    held = 24 + 24 + 4 * 24
    assert workload.peak_tokens(work, workload.sampled_nodes(work)) == workload.Spread(
        held, held, held
    )


@pytest.mark.parametrize(
    ("needed", "budget", "expected"),
    [([], 10, 0), ([10, 3], 10, 0), ([11, 9, 30], 10, 21), ([5, 5], 0, 10)],
)
def test_what_does_not_fit_must_cross_the_link_every_round(needed, budget, expected):
    assert workload.dm_lower_bound_bytes(needed, budget) == expected
