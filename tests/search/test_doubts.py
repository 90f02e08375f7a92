"""What is said of scores that guided nothing, and of answers that nobody stated."""

import pytest

from beamwright.config import Settings
from beamwright.search.defaults import with_defaults
from beamwright.search.doubts import (
    doubts_about_answers,
    doubts_about_scores,
    doubts_about_trust,
)
from beamwright.tree import SearchTree, StopReason


def scored(scores, texts=None):
    """A tree of one round, with these step scores."""
    tree = SearchTree(0, (1, 2), "6*7?")
    for number, (node, score) in enumerate(
        zip(tree.expand(tree.root, len(scores)), scores, strict=True)
    ):
        text = f"step {number}" if texts is None else texts[number]
        tree.commit(node, (5,), (-0.1,), StopReason.EOS, text)
        node.step_score = score
    return tree


def about(tree, **options):
    return doubts_about_scores(tree, with_defaults(Settings.build(**options)))


def test_scores_that_tell_steps_apart_are_not_doubted():
    assert about(scored([0.1, 0.9, 0.5, 0.4])) == []
    assert about(scored([0.1, 0.9, None, None])) == []


def test_most_steps_without_a_score():
    (line,) = about(scored([None, None, None, 0.5]), model="own", verifier="prm")
    assert line.startswith("3 of 4 steps got no score from --verifier prm")


def test_equal_scores():
    (line,) = about(scored([6e-319, 0.0, 1e-9, 0.0]))
    assert line.startswith("all 4 scores of --verifier bundled are equal (6e-319)")


def test_equal_texts_have_equal_scores():
    assert about(scored([0.5] * 4, ["same"] * 4)) == []


def test_critiques_that_nobody_can_read():
    tree = scored([None, None, None, 0.5])
    for node in tree.finished() or tree.candidates():
        node.usage["judge_unparsed"] = int(node.step_score is None)
    (line,) = about(tree, model="own", verifier="judge:chat")
    assert line.startswith("3 of 4 critiques of --verifier judge:chat state no score")


@pytest.mark.parametrize(
    "options",
    [
        {"model": "own"},
        {"model": "own", "search": "best-of-n", "n": 1, "verifier": "none"},
        {"model": "random:opt-6.7b"},
    ],
)
def test_nobody_misses_scores_that_nothing_reads(options):
    assert about(scored([None] * 4), **options) == []


def test_a_function_that_has_no_opinion_is_told():
    settings = with_defaults(Settings.build(model="own", verifier="none"), own_scores=True)
    (line,) = doubts_about_scores(scored([None] * 4), settings)
    assert line.startswith("4 of 4 steps got no score from the verifier")


def test_no_answer_has_a_remedy():
    settings = Settings.build(model="own")
    (line,) = doubts_about_answers([None, None], ["eos", "eos"], settings)
    assert line.startswith("no candidate states an answer: this is the last step of the best one")
    assert "--system-prompt 'Put your final answer within \\boxed{}.'" in line
    (line,) = doubts_about_answers([None], ["path_limit"], settings)
    assert "raise --max-rounds" in line
    asked = Settings.build(model="own", system_prompt="Think.")
    assert "more clearly" in doubts_about_answers([None], ["eos"], asked)[0]
    (line,) = doubts_about_answers([None, "4"], ["eos", "round_limit"], settings)
    assert line.startswith("no finished candidate states an answer")


def test_a_verifier_that_trusts_nobody():
    settings = with_defaults(Settings.build())
    (line,) = doubts_about_trust([2e-320, None, 0.0], settings)
    assert line.startswith("the verifier trusts no candidate (best score 2e-320)")
    assert doubts_about_trust([0.2, 1e-9], settings) == []
    assert doubts_about_trust([-3.5, -0.1], settings) == []  # log-probabilities
    assert doubts_about_trust([None], settings) == []
