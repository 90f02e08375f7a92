import pytest

from beamwright.protocols import Complete, Extend, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from played import actions_of, first_round


def dynamic(**settings):
    return make_strategy(SearchSettings(search="dynamic", **settings))


def test_linear_shares():
    tree, nodes = first_round([0.6, 0.2, 0.2, 0.0])
    assert actions_of(dynamic(n=5, branching="linear"), tree) == [
        Extend(nodes[0], 3),
        Extend(nodes[1], 1),
        Extend(nodes[2], 1),
        Prune(nodes[3]),
    ]


def test_softmax_shares_follow_the_temperature():
    tree, nodes = first_round([0.9, 0.5, 0.1, 0.1])
    sharp = actions_of(dynamic(n=4, score_temperature=0.01), tree)
    assert sharp[0] == Extend(nodes[0], 4)
    assert sharp[1:] == [Prune(nodes[1]), Prune(nodes[2]), Prune(nodes[3])]
    flat = actions_of(dynamic(n=4, score_temperature=100.0), tree)
    assert {action.children for action in flat} == {1}


def test_rebase_by_hand():
    """exp(0.9/0.2) : exp(0.7/0.2) : exp(0.1/0.2) = 90.0 : 33.1 : 1.65, of 6: 4.33 1.59 0.08."""
    tree, nodes = first_round([0.1, 0.9, 0.7])
    assert actions_of(dynamic(n=6), tree) == [
        Extend(nodes[1], 4),
        Extend(nodes[2], 2),
        Prune(nodes[0]),
    ]


def test_finished_paths_keep_their_place():
    tree, nodes = first_round([0.5, 0.5, 0.5], ended=[1])
    assert actions_of(dynamic(n=3), tree) == [
        Complete(nodes[1]),
        Extend(nodes[0], 1),
        Extend(nodes[2], 1),
    ]


@pytest.mark.parametrize("branching", ["softmax", "linear"])
def test_a_candidate_without_a_score_is_the_last_to_get_children(branching):
    tree, nodes = first_round([None, 0.5])
    actions = actions_of(dynamic(n=4, branching=branching), tree)
    assert actions == [Extend(nodes[1], 4), Prune(nodes[0])]
