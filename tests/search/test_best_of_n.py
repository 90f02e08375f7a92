import pytest

from beamwright.errors import InputError
from beamwright.protocols import Complete, Extend, Finish
from beamwright.search import make_strategy
from beamwright.search.best_of_n import BestOfN
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step, grow, new_tree
from played import actions_of


@pytest.fixture
def strategy():
    return make_strategy(SearchSettings(search="best-of-n", n=3, max_rounds=5))


def test_it_starts_with_n_paths(strategy):
    tree = new_tree()
    assert isinstance(strategy, BestOfN)
    assert actions_of(strategy, tree) == [Extend(tree.root, 3)]


def test_width_does_not_matter():
    assert make_strategy(SearchSettings(search="best-of-n", n=1, width=4)).search.n == 1


def test_every_open_path_goes_on_and_ended_ones_are_set_aside(strategy):
    tree = new_tree()
    a, b, c = tree.expand(tree.root, 3)
    add_step(tree, a, "a")
    add_step(tree, b, "b", stop=StopReason.EOS)
    add_step(tree, c, "c", stop=StopReason.STEP_LIMIT)
    tree.rounds = 1
    assert actions_of(strategy, tree) == [Complete(b), Extend(a, 1), Extend(c, 1)]


def test_it_finishes_when_all_have_ended(strategy):
    tree = new_tree()
    nodes = grow(tree, tree.root, list("abc"), stop=StopReason.PATH_LIMIT)
    tree.rounds = 1
    assert actions_of(strategy, tree) == [*map(Complete, nodes), Finish()]


def test_it_says_how_many_the_round_limit_cut_off(strategy):
    tree = new_tree()
    nodes = grow(tree, tree.root, ["a"], stop=StopReason.EOS) + grow(tree, tree.root, ["b", "c"])
    tree.rounds = 5
    finish = Finish("2 of 3 paths reached --max-rounds")
    assert actions_of(strategy, tree) == [Complete(nodes[0]), finish]


def test_an_unknown_strategy_lists_the_known_ones():
    with pytest.raises(InputError, match=r"--search 'astar': choose one of beam, varying"):
        make_strategy(SearchSettings(search="astar"))
