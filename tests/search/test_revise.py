from beamwright.protocols import Ask, EndSearch, Extend, FinishPath
from beamwright.search import make_strategy
from beamwright.search.revise import CRITIQUE, best_answer_node
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import add_step, new_tree
from played import actions_of, obey, play

EOS = StopReason.EOS


def revise(**settings):
    return make_strategy(SearchSettings(search="revise", **{"n": 1, **settings}))


def replied(tree, strategy, *steps):
    """Let the only path go on by these (text, stop, score) steps; returns its leaf."""
    leaf = None
    for text, stop, score in steps:
        obey(tree, actions_of(strategy, tree))
        (leaf,) = tree.open_nodes()
        add_step(tree, leaf, text, stop=stop)
        leaf.score = score
        tree.rounds += 1
    return leaf


def test_a_draft_is_criticised_and_written_again():
    tree, strategy = new_tree(), revise()
    draft = replied(tree, strategy, ("a", StopReason.DELIMITER, 0.4), ("b", EOS, 0.3))
    (asked,) = actions_of(strategy, tree)
    assert asked == Ask(draft, strategy.turns[0])
    assert asked.turn.text == CRITIQUE
    assert not asked.turn.answers
    critique = replied(tree, strategy, ("bad", EOS, None))
    assert critique.text == "bad"
    assert not critique.answers
    assert actions_of(strategy, tree) == [Ask(critique, strategy.turns[1])]
    new = replied(tree, strategy, ("c", EOS, 0.2))
    assert (new.text, new.answers, new.reply()) == ("c", True, [new])
    assert actions_of(strategy, tree) == [FinishPath(new), EndSearch()]


def test_the_best_scored_answer_of_a_path_stands_and_the_last_without_scores():
    for scores, best in [
        ((0.3, 0.2), 0),
        ((0.2, 0.3), 1),
        ((0.3, 0.3 + 1e-9), 1),
        ((None,) * 2, 1),
    ]:
        tree, strategy = new_tree(), revise()
        answers = [replied(tree, strategy, ("draft", EOS, scores[0]))]
        replied(tree, strategy, ("critique", EOS, 0.9))
        answers.append(replied(tree, strategy, ("new", EOS, scores[1])))
        assert best_answer_node(answers[-1]) is answers[best]


def test_a_critique_is_no_answer_and_neither_is_half_a_revision():
    tree, strategy = new_tree(), revise(revisions=2)
    draft = replied(tree, strategy, ("draft", EOS, 0.1))
    assert best_answer_node(replied(tree, strategy, ("critique", EOS, None))) is draft
    half = replied(tree, strategy, ("new", StopReason.DELIMITER, 0.9))
    assert best_answer_node(half) is draft


def test_a_reply_that_a_limit_cut_off_is_not_asked_about():
    tree, strategy = new_tree(), revise()
    draft = replied(tree, strategy, ("draft", StopReason.PATH_LIMIT, 0.1))
    assert actions_of(strategy, tree) == [FinishPath(draft), EndSearch()]


def test_a_leaf_that_was_never_asked_is_its_own_answer():
    tree = new_tree()
    (child,) = tree.expand(tree.root, 1)
    assert best_answer_node(add_step(tree, child, "x")) is child


def test_every_path_is_asked_twice_per_revision():
    tree, reason = play(revise(n=3, revisions=2, max_rounds=100), seed=4)
    assert reason is None
    leaves = tree.finished()
    assert len(leaves) == 3
    for leaf in leaves:
        turns = [node.turn for node in leaf.path() if node.turn is not None]
        assert [turn.answers for turn in turns] == [False, True] * 2
    assert all(isinstance(a, Extend) for a in actions_of(revise(n=3), new_tree()))
