"""What each strategy that goes by rounds does with a round's candidates."""

import pytest

from beamwright.protocols import EndSearch, Extend, FinishPath, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from played import actions_of, first_round, obey, write_round
from tables import beside

CASES = beside(__file__)


def made(search, **settings):
    return make_strategy(SearchSettings(search=search, **settings))


def in_words(actions, nodes):
    """A round's decisions: `0x2` two children of candidate 0, `-0` pruned, `+0` complete."""
    said = []
    for action in actions:
        match action:
            case Extend(node, children):
                said.append(f"{nodes.index(node)}x{children}{' greedy' * action.greedy}")
            case Prune(node):
                said.append(f"-{nodes.index(node)}")
            case FinishPath(node):
                said.append(f"+{nodes.index(node)}")
            case EndSearch(reason):
                said.append(reason or "over")
    return ", ".join(said)


BEAM, DVTS = {"search": "beam", "n": 4, "width": 2}, {"search": "dvts", "n": 4, "width": 2}
DISTINCT = {"filter_duplicates": True}


@pytest.mark.parametrize(("settings", "scores", "ended", "expected"), CASES["rounds"])
def test_what_becomes_of_a_rounds_candidates(settings, scores, ended, expected):
    tree, nodes = first_round(scores, ended)
    assert in_words(actions_of(made(**settings), tree), nodes) == expected


def test_duplicates_are_dropped_only_when_asked_for_and_within_a_subtree():
    tree, nodes = first_round([0.9, 0.8, 0.7, 0.6])
    for node, text in zip(nodes, "aaab", strict=True):
        node.text = text
    for settings, expected in [
        (BEAM, "0x2, 1x2, -2, -3"),
        ({**BEAM, **DISTINCT}, "-1, -2, 0x2, 3x2"),
        ({**DVTS, **DISTINCT}, "-1, 0x2, 2x2, -3"),
    ]:
        assert in_words(actions_of(made(**settings), tree), nodes) == expected


# --- lookahead -----------------------------------------------------------------------------------


def test_the_end_of_the_rollout_decides_and_not_the_candidate():
    strategy = made("lookahead", n=4, width=2, lookahead=2)
    tree, nodes = first_round([0.9, 0.8, 0.2, 0.1])
    actions = actions_of(strategy, tree)
    assert actions == [Extend(node, 1, greedy=True) for node in nodes]
    obey(tree, actions)
    rollouts = write_round(tree, [0.5, 0.2, 0.5, 0.5], ended=[1])
    assert all(node.greedy for node in rollouts)
    obey(tree, actions_of(strategy, tree))
    ends = write_round(tree, [0.1, 0.3, 0.4])
    actions = actions_of(strategy, tree)
    dropped = {*rollouts, *ends}
    losers = [Prune(nodes[1]), Prune(nodes[0])]
    chosen = [Extend(nodes[3], 2), Extend(nodes[2], 2)]
    assert [action.node for action in actions[:7]] == sorted(
        dropped, key=lambda n: (n.lineage[:3], -n.depth)
    )
    assert actions[7:] == [*chosen, *losers]
    obey(tree, actions)
    children = tree.open_nodes()
    assert [node.parent for node in children] == [nodes[2]] * 2 + [nodes[3]] * 2
    assert not any(node.greedy for node in children)
    assert {node.lineage[-1] for node in children} == {1, 2}, "the rollout was child 0"


def test_the_draw_depends_on_the_seed_only():
    tree, nodes = first_round([0.1 * i for i in range(8)])
    draws = [actions_of(made("particles", n=8, seed=seed), tree) for seed in [*range(12)] * 2]
    assert draws[:12] == draws[12:]
    assert len({in_words(draw, nodes) for draw in draws}) > 1
    given = [sum(a.children for a in draw if isinstance(a, Extend)) for draw in draws]
    assert given == [8] * 24
