"""Every strategy with a real model: exactly n, and the same tree whatever the schedule."""

from engines import grow

FAST = {"n": 8, "width": 2, "max_rounds": 12, "max_step_tokens": 12, "max_tokens": 30}


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
