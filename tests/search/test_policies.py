"""What each strategy that goes by rounds does with a round's candidates."""

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Complete, Extend, Finish, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step
from played import actions_of, first_round, obey, play


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
            case Complete(node):
                said.append(f"+{nodes.index(node)}")
            case Finish(reason):
                said.append(reason or "over")
    return ", ".join(said)


FOUR, HALVES = [0.1, 0.9, 0.3, 0.8], [0.9, 0.8, 0.1, 0.2]
BEAM, DVTS = {"search": "beam", "n": 4, "width": 2}, {"search": "dvts", "n": 4, "width": 2}
DISTINCT = {"filter_duplicates": True}
DYNAMIC, PARTICLES = {"search": "dynamic", "n": 4}, {"search": "particles", "n": 4}
COLD = {"score_temperature": 0.01}


@pytest.mark.parametrize(
    ("settings", "scores", "ended", "expected"),
    [
        # The best n / width get width children; ended paths keep their place whatever they score.
        (BEAM, FOUR, [], "1x2, 3x2, -2, -0"),
        (BEAM, FOUR, [0], "+0, 1x2, 3x1, -2"),
        ({**BEAM, "n": 2}, [0.1, 0.9, 0.5], [0, 1], "+0, +1, -2, over"),
        ({**BEAM, "max_rounds": 1}, FOUR, [1], "+1, 3 of 4 paths reached --max-rounds"),
        # Every open path goes on.
        ({"search": "best-of-n", "n": 3}, FOUR[:3], [1], "+1, 0x1, 2x1"),
        # The best of each subtree goes on however bad it is; an ended path takes a place there.
        (DVTS, HALVES, [], "0x2, -1, 3x2, -2"),
        (DVTS, HALVES, [0], "+0, 1x1, 3x2, -2"),
        # exp(0.9/0.2) : exp(0.7/0.2) : exp(0.1/0.2) = 90.0 : 33.1 : 1.65, of 6: 4.33 1.59 0.08.
        ({**DYNAMIC, "n": 6}, [0.1, 0.9, 0.7], [], "1x4, 2x2, -0"),
        ({**DYNAMIC, **COLD}, [0.9, 0.5, 0.1, 0.1], [], "0x4, -1, -2, -3"),
        ({**DYNAMIC, "score_temperature": 100.0}, FOUR, [], "1x1, 3x1, 2x1, 0x1"),
        (DYNAMIC, [None, 0.5], [], "1x4, -0"),
        # A sharp temperature leaves one particle; even ones are not resampled below a threshold.
        ({**PARTICLES, "n": 3, **COLD}, [0.1, 0.9, 0.2], [], "-0, 1x3, -2"),
        ({**PARTICLES, "ess": 0.5}, [0.5, 0.5, 0.6, 0.4], [], "0x1, 1x1, 2x1, 3x1"),
        ({**PARTICLES, "ess": 0.5}, [0.0, 0.0, 9.0, 0.0], [], "-0, -1, 2x4, -3"),
        # An ended path is not rolled out.
        ({"search": "lookahead", "n": 2, "width": 1}, [0.9, 0.8], [0], "+0, 1x1 greedy"),
    ],
)
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


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"search": "beam", "n": 2, "width": 4}, "--n 2 is smaller than --width 4"),
        ({"search": "beam", "n": 6, "width": 4}, "--n 6 is not a multiple of --width 4"),
        ({"search": "astar"}, "--search 'astar': choose one of beam, varying"),
        ({"search": "mcts", "n": 4, "nodes": 3}, "--nodes 3 is smaller than --n 4"),
        ({"search": "mcts", "n": 2, "width": 4}, "--n 2 is smaller than --width 4"),
        ({"search": "mcts", "exploration": -0.1}, "exploration"),
    ],
)
def test_impossible_settings_name_their_options(settings, complaint):
    with pytest.raises(InputError, match=complaint):
        made(**settings)


def test_subtrees_never_compete():
    width = 3

    def one_survivor_per_subtree(tree):
        parents = [node.parent for node in tree.open_nodes() if node.parent is not tree.root]
        subtrees = {parent: parent.lineage[1] // width for parent in parents}
        assert len(set(subtrees.values())) == len(subtrees)

    tree, _ = play(
        made("dvts", n=9, width=width, max_rounds=100), 3, check=one_survivor_per_subtree
    )
    ends = [node.lineage[1] // width for node in tree.finished()]
    assert [ends.count(subtree) for subtree in range(3)] == [3, 3, 3]


# --- lookahead -----------------------------------------------------------------------------------


def write(tree, scores, ended=()):
    """Write the open steps, in lineage order."""
    nodes = tree.open_nodes()
    for i, (node, score) in enumerate(zip(nodes, scores, strict=True)):
        add_step(tree, node, "x", stop=StopReason.EOS if i in ended else StopReason.DELIMITER)
        node.score = score
    tree.rounds += 1
    return nodes


def test_the_end_of_the_rollout_decides_and_not_the_candidate():
    strategy = made("lookahead", n=4, width=2, lookahead=2)
    tree, nodes = first_round([0.9, 0.8, 0.2, 0.1])
    actions = actions_of(strategy, tree)
    assert actions == [Extend(node, 1, greedy=True) for node in nodes]
    obey(tree, actions)
    rollouts = write(tree, [0.5, 0.2, 0.5, 0.5], ended=[1])
    assert all(node.greedy for node in rollouts)
    obey(tree, actions_of(strategy, tree))
    ends = write(tree, [0.1, 0.3, 0.4])
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
