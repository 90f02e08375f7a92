import pytest

from beamwright.search.rounds import duplicates, ranked
from fakes import grow, new_tree


def candidates(scores, texts=None):
    tree = new_tree()
    nodes = grow(tree, tree.root, texts or ["a"] * len(scores))
    for node, score in zip(nodes, scores, strict=True):
        node.score = score
    return nodes


def ordinals(nodes):
    return [node.lineage[-1] for node in nodes]


@pytest.mark.parametrize("shift", [1, -1])
def test_best_first_whatever_the_order_given(shift):
    nodes = candidates([0.2, 0.9, 0.5, 0.7])
    assert ordinals(ranked(nodes[::shift])) == [1, 3, 2, 0]


def test_ties_within_a_millionth_go_by_lineage():
    nodes = candidates([0.5, 0.5 + 2e-7, 0.5 - 2e-7, 0.5 + 1e-5])
    assert ordinals(ranked(nodes[::-1])) == [3, 0, 1, 2]


def test_lineage_is_compared_as_numbers():
    nodes = candidates([0.5] * 12)
    assert ordinals(ranked(nodes[::-1])) == list(range(12))


def test_a_node_without_a_score_comes_last():
    nodes = candidates([None, -5.0, None])
    assert ordinals(ranked(nodes)) == [1, 0, 2]


def test_the_first_of_equal_texts_is_not_a_duplicate():
    nodes = candidates([0.1, 0.2, 0.3, 0.4], ["a", "b", "a", "a"])
    assert ordinals(duplicates(nodes)) == [2, 3]
    assert duplicates([]) == []
