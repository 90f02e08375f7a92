import random

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Complete, Extend, Finish, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step, grow, new_tree
from played import actions_of


def beam(**settings):
    return make_strategy(SearchSettings(search="beam", **settings))


def candidates(scores, ended=(), texts=None):
    """A tree of one round; `ended` are the ordinals whose path has ended."""
    tree = new_tree()
    nodes = tree.expand(tree.root, len(scores))
    for i, (node, score) in enumerate(zip(nodes, scores, strict=True)):
        stop = StopReason.EOS if i in ended else StopReason.DELIMITER
        add_step(tree, node, texts[i] if texts else f"{i}.", stop=stop)
        node.score = score
    tree.rounds = 1
    return tree, nodes


def test_it_starts_with_n_paths():
    tree = new_tree()
    assert actions_of(beam(n=8, width=4), tree) == [Extend(tree.root, 8)]


def test_the_best_n_over_width_get_width_children():
    tree, nodes = candidates([0.1, 0.9, 0.3, 0.8])
    assert actions_of(beam(n=4, width=2), tree) == [
        Extend(nodes[1], 2),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
        Prune(nodes[0]),
    ]


def test_ended_paths_keep_their_place_whatever_their_score():
    tree, nodes = candidates([0.1, 0.9, 0.3, 0.8], ended=[0])
    assert actions_of(beam(n=4, width=2), tree) == [
        Complete(nodes[0]),
        Extend(nodes[1], 2),
        Extend(nodes[3], 1),
        Prune(nodes[2]),
    ]


def test_it_ends_when_n_have_finished_and_prunes_the_rest():
    tree, nodes = candidates([0.1, 0.9], ended=[0])
    tree.finish(nodes[0])
    tree.keep(nodes[1])
    children = grow(tree, nodes[1], ["x"], stop=StopReason.EOS)
    spare = grow(tree, nodes[1], ["y"])
    tree.rounds = 2
    assert actions_of(beam(n=2, width=2), tree) == [
        Complete(children[0]),
        Prune(spare[0]),
        Finish(),
    ]


def test_the_round_limit_is_named():
    tree, nodes = candidates([0.1, 0.9, 0.2, 0.3], ended=[1])
    actions = actions_of(beam(n=4, width=2, max_rounds=1), tree)
    assert actions == [Complete(nodes[1]), Finish("3 of 4 paths reached --max-rounds")]


def test_duplicates_are_dropped_only_when_asked_for():
    tree, nodes = candidates([0.9, 0.8, 0.7, 0.6], texts=["same", "same", "b", "c"])
    kept = actions_of(beam(n=4, width=2), tree)
    assert kept[:2] == [Extend(nodes[0], 2), Extend(nodes[1], 2)]
    dropped = actions_of(beam(n=4, width=2, filter_duplicates=True), tree)
    assert dropped == [
        Prune(nodes[1]),
        Extend(nodes[0], 2),
        Extend(nodes[2], 2),
        Prune(nodes[3]),
    ]


def test_an_ended_duplicate_does_not_take_a_place():
    tree, nodes = candidates([0.9, 0.8], ended=[0, 1], texts=["same", "same"])
    actions = actions_of(beam(n=2, width=2, filter_duplicates=True), tree)
    finish = Finish("1 of 2 paths were duplicates")
    assert actions == [Prune(nodes[1]), Complete(nodes[0]), finish]


def test_a_round_always_extends_n_minus_the_finished():
    for seed in range(20):
        rng = random.Random(seed)
        width = rng.choice([1, 2, 3, 4])
        n = width * rng.randint(1, 5)
        strategy, tree = beam(n=n, width=width, max_rounds=50), new_tree()
        while not tree.done:
            finished = len(tree.finished())
            judged = set()
            for action in actions_of(strategy, tree):
                if isinstance(action, Finish):
                    tree.done = True
                    assert action.reason is None
                    continue
                assert action.node not in judged
                judged.add(action.node)
                if isinstance(action, Complete):
                    tree.finish(action.node)
                elif isinstance(action, Prune):
                    tree.prune(action.node)
                else:
                    if action.node is not tree.root:
                        tree.keep(action.node)
                    tree.expand(action.node, action.children)
            assert not tree.candidates()
            finished = len(tree.finished())
            assert len(tree.open_nodes()) == (0 if tree.done else n - finished)
            for node in tree.open_nodes():
                stop = StopReason.EOS if rng.random() < 0.3 else StopReason.DELIMITER
                add_step(tree, node, rng.choice("abc"), stop=stop)
                node.score = rng.choice([None, rng.random()])
            tree.rounds += 1
        assert len(tree.finished()) == n


@pytest.mark.parametrize(
    ("n", "width", "complaint"),
    [(2, 4, "--n 2 is smaller than --width 4"), (6, 4, "--n 6 is not a multiple of --width 4")],
)
def test_impossible_widths_name_their_options(n, width, complaint):
    with pytest.raises(InputError, match=complaint):
        beam(n=n, width=width)
