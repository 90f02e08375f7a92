"""What each strategy that goes by rounds does with a round's candidates."""

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Complete, Extend, Finish, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step, grow, new_tree
from played import actions_of, first_round, obey, play


def made(search, **settings):
    return make_strategy(SearchSettings(search=search, **settings))


# --- beam ----------------------------------------------------------------------------------------


def test_it_starts_with_n_paths():
    tree = new_tree()
    assert actions_of(made("beam", n=8, width=4), tree) == [Extend(tree.root, 8)]


def test_the_best_n_over_width_get_width_children():
    tree, nodes = first_round([0.1, 0.9, 0.3, 0.8])
    assert actions_of(made("beam", n=4, width=2), tree) == [
        Extend(nodes[1], 2),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
        Prune(nodes[0]),
    ]


def test_ended_paths_keep_their_place_whatever_their_score():
    tree, nodes = first_round([0.1, 0.9, 0.3, 0.8], ended=[0])
    assert actions_of(made("beam", n=4, width=2), tree) == [
        Complete(nodes[0]),
        Extend(nodes[1], 2),
        Extend(nodes[3], 1),
        Prune(nodes[2]),
    ]


def test_it_ends_when_n_have_finished_and_prunes_the_rest():
    tree, nodes = first_round([0.1, 0.9], ended=[0])
    tree.finish(nodes[0])
    tree.keep(nodes[1])
    children = grow(tree, nodes[1], ["x"], stop=StopReason.EOS)
    spare = grow(tree, nodes[1], ["y"])
    tree.rounds = 2
    assert actions_of(made("beam", n=2, width=2), tree) == [
        Complete(children[0]),
        Prune(spare[0]),
        Finish(),
    ]


def test_the_round_limit_is_named():
    tree, nodes = first_round([0.1, 0.9, 0.2, 0.3], ended=[1])
    actions = actions_of(made("beam", n=4, width=2, max_rounds=1), tree)
    assert actions == [Complete(nodes[1]), Finish("3 of 4 paths reached --max-rounds")]


def test_duplicates_are_dropped_only_when_asked_for():
    tree, nodes = first_round([0.9, 0.8, 0.7, 0.6])
    nodes[1].text = nodes[0].text
    kept = actions_of(made("beam", n=4, width=2), tree)
    assert kept[:2] == [Extend(nodes[0], 2), Extend(nodes[1], 2)]
    dropped = actions_of(made("beam", n=4, width=2, filter_duplicates=True), tree)
    assert dropped == [Prune(nodes[1]), Extend(nodes[0], 2), Extend(nodes[2], 2), Prune(nodes[3])]


@pytest.mark.parametrize(
    ("n", "width", "complaint"),
    [(2, 4, "--n 2 is smaller than --width 4"), (6, 4, "--n 6 is not a multiple of --width 4")],
)
def test_impossible_widths_name_their_options(n, width, complaint):
    with pytest.raises(InputError, match=complaint):
        made("beam", n=n, width=width)


# --- best-of-n -----------------------------------------------------------------------------------


@pytest.fixture
def strategy():
    return make_strategy(SearchSettings(search="best-of-n", n=3, max_rounds=5))


def test_every_open_path_goes_on_and_ended_ones_are_set_aside(strategy):
    tree = new_tree()
    a, b, c = tree.expand(tree.root, 3)
    add_step(tree, a, "a")
    add_step(tree, b, "b", stop=StopReason.EOS)
    add_step(tree, c, "c", stop=StopReason.STEP_LIMIT)
    tree.rounds = 1
    assert actions_of(strategy, tree) == [Complete(b), Extend(a, 1), Extend(c, 1)]


def test_it_says_how_many_the_round_limit_cut_off():
    strategy, tree = made("best-of-n", n=3, max_rounds=1), new_tree()
    nodes = grow(tree, tree.root, ["a"], stop=StopReason.EOS) + grow(tree, tree.root, ["b", "c"])
    tree.rounds = 1
    finish = Finish("2 of 3 paths reached --max-rounds")
    assert actions_of(strategy, tree) == [Complete(nodes[0]), finish]


def test_an_unknown_strategy_lists_the_known_ones():
    with pytest.raises(InputError, match=r"--search 'astar': choose one of beam, varying"):
        make_strategy(SearchSettings(search="astar"))


# --- dvts ----------------------------------------------------------------------------------------


def test_the_best_of_each_subtree_goes_on_however_bad_it_is():
    tree, nodes = first_round([0.9, 0.8, 0.1, 0.2])
    assert actions_of(made("dvts", n=4, width=2), tree) == [
        Extend(nodes[0], 2),
        Prune(nodes[1]),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
    ]


def test_a_finished_path_takes_a_place_of_its_own_subtree():
    tree, nodes = first_round([0.9, 0.8, 0.1, 0.2], ended=[0])
    actions = actions_of(made("dvts", n=4, width=2), tree)
    assert actions == [
        Complete(nodes[0]),
        Extend(nodes[1], 1),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
    ]
    obey(tree, actions)
    assert len(tree.open_nodes()) == 3


def test_duplicates_are_those_of_one_subtree():
    tree, nodes = first_round([0.9, 0.8, 0.1, 0.2])
    for node, text in zip(nodes, "aaab", strict=True):
        node.text = text
    assert actions_of(made("dvts", n=4, width=2, filter_duplicates=True), tree) == [
        Prune(nodes[1]),
        Extend(nodes[0], 2),
        Extend(nodes[3], 2),
        Prune(nodes[2]),
    ]


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


# --- dynamic -------------------------------------------------------------------------------------


def test_softmax_shares_follow_the_temperature():
    tree, nodes = first_round([0.9, 0.5, 0.1, 0.1])
    sharp = actions_of(made("dynamic", n=4, score_temperature=0.01), tree)
    assert sharp[0] == Extend(nodes[0], 4)
    assert sharp[1:] == [Prune(nodes[1]), Prune(nodes[2]), Prune(nodes[3])]
    flat = actions_of(made("dynamic", n=4, score_temperature=100.0), tree)
    assert {action.children for action in flat} == {1}


def test_rebase_by_hand():
    """exp(0.9/0.2) : exp(0.7/0.2) : exp(0.1/0.2) = 90.0 : 33.1 : 1.65, of 6: 4.33 1.59 0.08."""
    tree, nodes = first_round([0.1, 0.9, 0.7])
    assert actions_of(made("dynamic", n=6), tree) == [
        Extend(nodes[1], 4),
        Extend(nodes[2], 2),
        Prune(nodes[0]),
    ]


@pytest.mark.parametrize("branching", ["softmax", "linear"])
def test_a_candidate_without_a_score_is_the_last_to_get_children(branching):
    tree, nodes = first_round([None, 0.5])
    actions = actions_of(made("dynamic", n=4, branching=branching), tree)
    assert actions == [Extend(nodes[1], 4), Prune(nodes[0])]


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
    strategy = made("lookahead", n=2, width=1, lookahead=2)
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
    actions = actions_of(made("lookahead", n=2, width=1), tree)
    assert actions == [Complete(nodes[0]), Extend(nodes[1], 1, greedy=True)]


# --- particles -----------------------------------------------------------------------------------


def children(actions):
    return {action.node: action.children for action in actions if isinstance(action, Extend)}


def test_a_sharp_temperature_leaves_the_best_particle():
    tree, nodes = first_round([0.1, 0.9, 0.2])
    actions = actions_of(made("particles", n=3, score_temperature=0.01), tree)
    assert actions == [Prune(nodes[0]), Extend(nodes[1], 3), Prune(nodes[2])]


def test_the_draw_depends_on_the_seed_only():
    tree, nodes = first_round([0.1 * i for i in range(8)])
    draws = [
        tuple(
            children(actions_of(made("particles", n=8, seed=seed), tree)).get(node, 0)
            for node in nodes
        )
        for seed in [*range(12), *range(12)]
    ]
    assert draws[:12] == draws[12:]
    assert len(set(draws)) > 1
    assert all(sum(draw) == 8 for draw in draws)


def test_even_particles_are_not_resampled_where_a_threshold_says_so():
    tree, nodes = first_round([0.5, 0.5, 0.6, 0.4])
    assert actions_of(made("particles", n=4, ess=0.5), tree) == [Extend(node, 1) for node in nodes]
    uneven, _ = first_round([0.0, 0.0, 9.0, 0.0])
    assert len(children(actions_of(made("particles", n=4, ess=0.5), uneven))) == 1
