import pytest

from beamwright.tree import SearchTree, StopReason, tree_hash
from fakes import grow, new_tree


def build(tokens=(7, 8), stop=StopReason.DELIMITER, verb="keep", prompt=(1, 2), score=0.5):
    tree = SearchTree(0, prompt, "problem")
    first, second = tree.expand(tree.root, 2)
    tree.commit(first, tokens, (0.0,) * len(tokens), stop, "a")
    tree.commit(second, (9,), (0.0,), StopReason.EOS, "b")
    first.score = first.step_score = score
    getattr(tree, verb)(first)
    tree.finish(second)
    return tree


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (7, 9)},
        {"tokens": (78,)},
        {"stop": StopReason.STEP_LIMIT},
        {"verb": "prune"},
        {"prompt": (1, 3)},
    ],
)
def test_hash_sees_tokens_stops_and_pruning(change):
    assert tree_hash(build(**change)) != tree_hash(build())


def test_hash_does_not_see_scores_or_open_nodes():
    tree = build(score=0.1)
    expected = tree_hash(build())
    assert tree_hash(tree) == expected
    tree.expand(tree.root.children[0], 2)
    assert tree_hash(tree) == expected


def test_hash_tells_the_places_of_equal_steps_apart():
    left, right = new_tree(), new_tree()
    for tree, place in ((left, 0), (right, 1)):
        nodes = grow(tree, tree.root, ["a", "a"])
        for node in nodes:
            tree.keep(node)
        grow(tree, nodes[place], ["b"])
    assert tree_hash(left) != tree_hash(right)
