from collections import Counter

from beamwright.protocols import Complete, Extend, Prune
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from played import actions_of, first_round


def particles(**settings):
    return make_strategy(SearchSettings(search="particles", **settings))


def children(actions):
    return {action.node: action.children for action in actions if isinstance(action, Extend)}


def test_a_sharp_temperature_leaves_the_best_particle():
    tree, nodes = first_round([0.1, 0.9, 0.2])
    actions = actions_of(particles(n=3, score_temperature=0.01), tree)
    assert actions == [Prune(nodes[0]), Extend(nodes[1], 3), Prune(nodes[2])]


def test_the_draw_depends_on_the_seed_only():
    tree, nodes = first_round([0.1 * i for i in range(8)])
    draws = [
        tuple(children(actions_of(particles(n=8, seed=seed), tree)).get(node, 0) for node in nodes)
        for seed in [*range(12), *range(12)]
    ]
    assert draws[:12] == draws[12:]
    assert len(set(draws)) > 1
    assert all(sum(draw) == 8 for draw in draws)


def test_expected_children_follow_exp_of_the_score():
    tree, nodes = first_round([0.0, 1.0])
    total = Counter()
    for seed in range(2000):
        total.update(children(actions_of(particles(n=2, score_temperature=0.5, seed=seed), tree)))
    share = total[nodes[1]] / sum(total.values())
    assert abs(share - 0.8808) < 0.02  # e^2 / (1 + e^2)


def test_even_particles_are_not_resampled_where_a_threshold_says_so():
    tree, nodes = first_round([0.5, 0.5, 0.6, 0.4])
    assert actions_of(particles(n=4, ess=0.5), tree) == [Extend(node, 1) for node in nodes]
    uneven, _ = first_round([0.0, 0.0, 9.0, 0.0])
    assert len(children(actions_of(particles(n=4, ess=0.5), uneven))) == 1


def test_finished_particles_keep_their_place():
    tree, nodes = first_round([0.5, 0.5, 0.5], ended=[2])
    actions = actions_of(particles(n=3), tree)
    assert actions[0] == Complete(nodes[2])
    assert sum(children(actions).values()) == 2
