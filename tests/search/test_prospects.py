"""What strategies say of a round that is not over."""

from beamwright.search import make_strategy
from beamwright.search.prospects import FORESIGHTS, predict_by_scores, predict_certain
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step, new_tree


def second_round(parent_scores, children=2, complete=None):
    """Beams below parents with these scores; `complete` of them have their step, and no score."""
    tree = new_tree()
    parents = tree.expand(tree.root, len(parent_scores))
    beams, tree.rounds = [], 1
    for parent, score in zip(parents, parent_scores, strict=True):
        add_step(tree, parent, "p.")
        parent.score = score
        tree.keep(parent)
        beams += tree.expand(parent, children)
    for beam in beams[:complete]:
        add_step(tree, beam, "b.")
    return beams


def test_only_complete_steps_that_can_go_on_are_foreseen():
    beams = second_round([0.9, 0.1], complete=3)
    beams[0].stop = StopReason.EOS
    for by in FORESIGHTS.values():
        assert {each.node for each in by(beams, 2)} == set(beams[1:3])


def strategy(name, **options):
    return make_strategy(SearchSettings(search=name, n=4, width=2, max_rounds=3, **options))


def test_paths_that_nothing_competes_with_are_certain():
    beams = second_round([0.9, 0.1], complete=3)
    for name in ("best-of-n", "deepconf", "revise"):
        found = strategy(name).prospects(None, beams[:2], beams[2:3])
        assert [(each.node, each.children) for each in found] == [(beam, 1) for beam in beams[:3]]
    assert predict_certain(beams, max_depth=2) == [], "as deep as it may be"


def test_subtrees_of_dvts_do_not_compete_beforehand_either():
    """Two subtrees, of the root's children 0 and 1, and 2 and 3: the best of each is foreseen."""
    beams = second_round([0.9, 0.8, 0.2, 0.1], children=1, complete=4)
    for beam, score in zip(beams, [0.9, 0.7, 0.3, 0.1], strict=True):
        beam.score = score
    found = strategy("dvts").prospects(None, beams, [])
    foreseen = {each.node for each in found[:2]}
    assert foreseen == {beams[0], beams[2]}
    assert beams[2] not in {each.node for each in predict_by_scores(beams, 2) if each.potential > 1}


def test_dynamic_foresees_as_many_children_as_scores_would_give():
    beams = second_round([0.6, 0.1], children=2, complete=3)
    beams[0].score = 0.9  # the others' last scores are 0.6, 0.1, 0.1: 2.1, 1.4, 0.2 and 0.2 of 4
    found = strategy("dynamic", branching="linear").prospects(None, beams, [])
    assert [(each.node, each.children) for each in found] == [(beams[0], 2), (beams[1], 2)]
    beams[0].stop = StopReason.EOS
    assert {each.node for each in strategy("dynamic").prospects(None, beams, [])} <= set(beams[1:3])


def test_a_rollout_is_certain_and_greedy_until_it_is_over():
    search = strategy("lookahead", lookahead=1)
    beams = second_round([0.9, 0.1])
    assert all(each.greedy and each.children == 1 for each in search.prospects(None, beams, []))
    rollouts = second_round([0.9, 0.1], children=1)
    for rollout in rollouts:
        rollout.greedy = True
    assert search.prospects(None, rollouts, []) == [], "where it leads is not foreseen"
