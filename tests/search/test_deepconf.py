import pytest

from beamwright.protocols import EndSearch, Extend, FinishPath, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import NodeState
from fakes import new_tree
from played import actions_of, obey, play, write_round


def deepconf(**settings):
    return make_strategy(SearchSettings(search="deepconf", **settings))


def warmed(strategy, scores):
    """A tree whose warm-up paths have all ended at once with these scores."""
    tree = new_tree()
    obey(tree, actions_of(strategy, tree))
    return tree, write_round(tree, scores, ended=range(len(scores)))


def test_the_warm_up_runs_alone_and_is_never_given_up_on_the_way():
    strategy, tree = deepconf(n=8, warmup=3), new_tree()
    assert actions_of(strategy, tree) == [Extend(tree.root, 3)]
    obey(tree, actions_of(strategy, tree))
    one, two, three = write_round(tree, [9.0, 1.0, 5.0], ended=[2])
    assert actions_of(strategy, tree) == [FinishPath(three), Extend(one, 1), Extend(two, 1)]


def test_the_bar_is_a_percentile_of_the_warm_up_and_holds_for_it_too():
    strategy = deepconf(n=9, warmup=5, keep=0.5)
    tree, nodes = warmed(strategy, [5.0, 1.0, 3.0, 2.0, 4.0])
    actions = actions_of(strategy, tree)
    assert [a.node for a in actions if isinstance(a, Prune)] == [nodes[1], nodes[3]]
    assert [a.node for a in actions if isinstance(a, FinishPath)] == [nodes[0], nodes[2], nodes[4]]
    assert actions[-1] == Extend(tree.root, 4)
    obey(tree, actions)
    # The median is 3; equal is not below, and a path without a score is not either.
    a, b, c, d = write_round(tree, [3.0, 2.9, None, 3.0 - 1e-9], ended=[3])
    assert actions_of(strategy, tree) == [Prune(b), FinishPath(d), Extend(a, 1), Extend(c, 1)]


def test_a_warm_up_path_that_finished_early_can_lose_its_place():
    strategy, tree = deepconf(n=2, warmup=2, keep=0.1), new_tree()
    obey(tree, actions_of(strategy, tree))
    early, _ = write_round(tree, [1.0, 8.0], ended=[0])
    obey(tree, actions_of(strategy, tree))
    assert early.state is NodeState.FINISHED
    (late,) = write_round(tree, [6.0], ended=[0])
    reason = "1 of 2 paths fell below the warm-up's bar of 5.5 or reached --max-rounds"
    assert actions_of(strategy, tree) == [Prune(early), FinishPath(late), EndSearch(reason)]
    obey(tree, actions_of(strategy, tree))
    assert tree.finished() == [late]


def test_whole_searches():
    for seed in range(20):
        n, warmup = [(4, 1), (16, 5), (6, 6), (1, 1)][seed % 4]
        strategy = deepconf(n=n, warmup=warmup, keep=[0.1, 0.5, 0.9, 1.0][seed // 4 % 4])
        tree, reason = play(strategy, seed)
        assert len(tree.root.children) == n
        assert not tree.open_nodes()
        assert not tree.candidates()
        fewer = n - len(tree.finished())
        assert fewer < n
        assert (reason is None) == (fewer == 0)
        assert reason is None or reason.startswith(f"{fewer} of {n} paths fell below")
        bar = strategy._bar(tree)
        for node in tree.nodes():
            if node.parent and not node.children and node.score is not None:
                assert (node.state is NodeState.PRUNED) == (node.score < bar - 1e-6)


@pytest.mark.parametrize(("n", "warmup"), [(1, 1), (3, 1), (16, 4), (64, 16), (256, 16)])
def test_the_warm_up_is_a_quarter_and_at_most_16(n, warmup):
    tree = new_tree()
    assert actions_of(deepconf(n=n), tree) == [Extend(tree.root, warmup)]
