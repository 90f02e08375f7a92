from beamwright.protocols import Complete, Extend, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step
from played import actions_of, first_round, obey


def lookahead(**settings):
    return make_strategy(SearchSettings(search="lookahead", **settings))


def write(tree, scores, ended=()):
    """Write the open steps, in lineage order."""
    nodes = tree.open_nodes()
    for i, (node, score) in enumerate(zip(nodes, scores, strict=True)):
        add_step(tree, node, "x", stop=StopReason.EOS if i in ended else StopReason.DELIMITER)
        node.score = score
    tree.rounds += 1
    return nodes


def test_the_end_of_the_rollout_decides_and_not_the_candidate():
    strategy = lookahead(n=4, width=2, lookahead=2)
    tree, nodes = first_round([0.9, 0.8, 0.2, 0.1])
    actions = actions_of(strategy, tree)
    assert actions == [Extend(node, 1, greedy=True) for node in nodes]
    obey(tree, actions)
    rollouts = write(tree, [0.5, 0.5, 0.5, 0.5])
    assert all(node.greedy for node in rollouts)
    obey(tree, actions_of(strategy, tree))
    ends = write(tree, [0.1, 0.2, 0.3, 0.4])
    actions = actions_of(strategy, tree)
    dropped = [step for end in ends for step in (end, end.parent)]
    losers = [Prune(nodes[1]), Prune(nodes[0])]
    chosen = [Extend(nodes[3], 2), Extend(nodes[2], 2)]
    assert actions == [*map(Prune, dropped), *chosen, *losers]
    obey(tree, actions)
    children = tree.open_nodes()
    assert [node.parent for node in children] == [nodes[2]] * 2 + [nodes[3]] * 2
    assert not any(node.greedy for node in children)
    assert {node.lineage[-1] for node in children} == {1, 2}, "the rollout was child 0"


def test_a_rollout_that_ends_early_waits_for_the_others():
    strategy = lookahead(n=2, width=1, lookahead=2)
    tree, nodes = first_round([0.9, 0.8])
    obey(tree, actions_of(strategy, tree))
    first = write(tree, [0.9, 0.1], ended=[0])
    assert actions_of(strategy, tree) == [Extend(first[1], 1, greedy=True)]
    obey(tree, actions_of(strategy, tree))
    (last,) = write(tree, [0.5])
    actions = actions_of(strategy, tree)
    dropped = [Prune(first[0]), Prune(last), Prune(first[1])]
    assert actions == [*dropped, Extend(nodes[0], 1), Extend(nodes[1], 1)]


def test_candidates_whose_path_has_ended_are_set_aside_and_not_rolled_out():
    tree, nodes = first_round([0.9, 0.8], ended=[0])
    actions = actions_of(lookahead(n=2, width=1), tree)
    assert actions == [Complete(nodes[0]), Extend(nodes[1], 1, greedy=True)]
