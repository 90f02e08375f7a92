from beamwright.protocols import Complete, Extend, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from played import actions_of, first_round, obey, play


def dvts(**settings):
    return make_strategy(SearchSettings(search="dvts", **settings))


def test_the_best_of_each_subtree_goes_on_however_bad_it_is():
    tree, nodes = first_round([0.9, 0.8, 0.1, 0.2])
    assert actions_of(dvts(n=4, width=2), tree) == [
        Extend(nodes[0], 2),
        Prune(nodes[1]),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
    ]


def test_a_finished_path_takes_a_place_of_its_own_subtree():
    tree, nodes = first_round([0.9, 0.8, 0.1, 0.2], ended=[0])
    actions = actions_of(dvts(n=4, width=2), tree)
    assert actions == [
        Complete(nodes[0]),
        Extend(nodes[1], 1),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
    ]
    obey(tree, actions)
    assert len(tree.open_nodes()) == 3


def test_subtrees_never_compete():
    width = 3

    def one_survivor_per_subtree(tree):
        parents = [node.parent for node in tree.open_nodes() if node.parent is not tree.root]
        subtrees = {parent: parent.lineage[1] // width for parent in parents}
        assert len(set(subtrees.values())) == len(subtrees)

    tree, _ = play(dvts(n=9, width=width, max_rounds=100), 3, check=one_survivor_per_subtree)
    ends = [node.lineage[1] // width for node in tree.finished()]
    assert [ends.count(subtree) for subtree in range(3)] == [3, 3, 3]
