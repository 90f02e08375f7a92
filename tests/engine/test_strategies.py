"""Every strategy with a real model: exactly n, and the same tree whatever the schedule."""

import pytest

from beamwright.search import STRATEGIES
from declared import real_options
from engines import grow
from fakes import Grouping

FAST = {"n": 8, "width": 2, "max_rounds": 12, "max_step_tokens": 12, "max_tokens": 30}


@pytest.mark.parametrize("name", STRATEGIES)
def test_trees_do_not_depend_on_grouping_or_tiers(make_solver, name):
    options = real_options(name, **FAST)
    solver = make_solver(**options)
    expected, tree = grow(solver)
    if STRATEGIES[name].fills:
        assert len(expected.candidates) == FAST["n"]
    solver.schedule = Grouping(3, reverse=True)
    assert grow(solver)[0].tree_hash == expected.tree_hash
    least = max(node.end // 16 + 2 * node.depth for node in tree.nodes()) + 4
    with make_solver(
        **options, schedule="locality", kv_memory=least * 4096, host_memory="1MiB"
    ) as tight:
        assert grow(tight)[0].tree_hash == expected.tree_hash


def test_step_limits_hold_by_depth(make_solver):
    solver = make_solver(**FAST, step_limits="3,6", delimiter="Zq", ignore_eos=True)
    _, tree = grow(solver)
    lengths = {node.depth: set() for node in tree.nodes()}
    for node in tree.nodes():
        lengths[node.depth].add(len(node.token_ids))
    assert lengths[1] == {3}
    assert all(lengths[depth] <= {6, 30 - 3 - 6 * (depth - 2)} for depth in range(2, 6))


def test_rollouts_are_greedy_and_belong_to_no_candidate(make_solver):
    """A rollout's first step is the one that a search at temperature 0 would write there."""
    options = {**FAST, "delimiter": "Zq", "ignore_eos": True, "step_tokens": 5}
    solution, tree = grow(make_solver(**options, search="lookahead", lookahead=2))
    rollouts = [node for node in tree.nodes() if node.greedy]
    assert rollouts
    for finished in tree.finished():
        assert not any(node.greedy for node in finished.path())
    assert solution.tokens.kept < solution.tokens.generated
    by_start = {}
    for node in rollouts:
        start = tuple(node.parent.path_token_ids())
        assert by_start.setdefault(start, node.token_ids) == node.token_ids
    drawn = [node for node in tree.nodes() if node.parent is tree.root]
    assert len({node.token_ids for node in drawn}) > 1, "siblings are still drawn"
