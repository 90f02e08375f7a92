"""What is said of scores that guided nothing, and of answers that nobody stated."""

import pytest

from beamwright.config import Settings
from beamwright.evaluate.problems import BUNDLED, load_problems
from beamwright.search.defaults import with_defaults
from beamwright.search.doubts import (
    GRAMMAR,
    doubts_about_answers,
    doubts_about_drawing,
    doubts_about_problem,
    doubts_about_scores,
    doubts_about_trust,
    doubts_about_votes,
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


@pytest.mark.parametrize(
    "problem",
    [
        "Jack has 70 eggs. How many eggs does Jack have now?",
        "Jack has 70 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?",
        "  Pia has 81 pencils. In July Pia wins 26 pencils.\nHow many pencils does Pia have?\n",
        "Zoë-Ann had 5 toy cars. Then in May Zoë-Ann gives away 2 boxes with 2 toy cars each. "
        "Later in June Zoë-Ann doubles the number of toy cars. "
        "In July Zoë-Ann gives half of the toy cars. How many toy cars does Zoë-Ann have?",
        "Ann owns 3 cups. In May Ann gives 1 cups away. How many cups does Ann have in the end?",
        # A prompt that is to be continued.
        "Jack has 70 eggs. How many eggs does Jack have now?\n\nThe answer is",
    ],
)
def test_the_bundled_models_know_such_problems(problem):
    assert doubts_about_problem(problem, Settings.build()) == []


@pytest.mark.parametrize(
    "problem",
    [
        "What is 2+2?",
        "Ann has 12 marbles. She buys 5 more and gives away 3. How many marbles does Ann have now?",
        "Tom has 4 marbles. He finds 3 more. How many marbles does Tom have now?",
        "Ann has 12 apples. She eats 3. How many are left?",
        "Jack has 70 eggs. In April Jill gets 9 eggs. How many eggs does Jack have now?",
        "Jack has 70 eggs. In April Jack gets 9 hens. How many eggs does Jack have now?",
        "Jack has 7000 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?",
        "Jack has 70 eggs. In spring Jack gets 9 eggs. How many eggs does Jack have now?",
        "Jack has 70 eggs. In April Jack gets 9 eggs.",
        "Jack has 70 eggs. " + "In May Jack gets 9 eggs. " * 20_000 + "How many?",
    ],
    ids=lambda problem: problem[:20],
)
def test_other_problems_are_told_what_it_knows(problem):
    (line,) = doubts_about_problem(problem, Settings.build(model="bundled:strong"))
    assert GRAMMAR in line
    assert doubts_about_problem(problem, Settings.build(model="own")) == []


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_problem_is_of_that_kind(name):
    for problem in load_problems(f"bundled:{name}").problems:
        assert doubts_about_problem(problem.problem, Settings.build()) == []


@pytest.mark.parametrize(
    ("votes", "search", "doubted"),
    [
        (["1", "2", None], "majority", True),
        (["1", None], "majority", True),
        (["1", "1", "2"], "majority", False),
        (["1"], "majority", False),
        (["1", "2"], "beam", False),
    ],
)
def test_a_vote_won_with_one_vote(votes, search, doubted):
    said = doubts_about_votes(votes, "1", Settings.build(search=search))
    assert [line.partition(":")[0] for line in said] == ["the vote was won with one vote"] * doubted


def test_candidates_that_are_copies_as_nothing_was_drawn():
    greedy = Settings.build(temperature=0.0)
    (line,) = doubts_about_drawing(["a", "a"], greedy)
    assert line.startswith("all 2 candidates are the same text: --temperature 0")
    for texts, settings in ((["a", "b"], greedy), (["a"], greedy), (["a", "a"], Settings())):
        assert doubts_about_drawing(texts, settings) == []
