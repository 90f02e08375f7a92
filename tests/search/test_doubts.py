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


def unanswered(answers, stops, **options):
    return doubts_about_answers(answers, stops, Settings.build(model="own", **options))


def trusted(*scores):
    return doubts_about_trust(scores, with_defaults(Settings.build()))


def votes(votes, search="majority"):
    return doubts_about_votes(votes, "1", Settings.build(search=search))


def copies(*texts, temperature=0.0):
    return doubts_about_drawing(texts, Settings.build(temperature=temperature))


LONELY = "the vote was won with one vote"
ONE_PATH = {"search": "best-of-n", "n": 1, "verifier": "none"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        # Scores that guided nothing, where something reads them.
        (about(scored([0.1, 0.9, 0.5, 0.4])), None),
        (
            about(scored([None, None, None, 0.5]), model="own", verifier="prm"),
            "3 of 4 steps got no score from --verifier prm",
        ),
        (
            about(scored([6e-319, 0.0, 1e-9, 0.0])),
            "all 4 scores of --verifier bundled are equal (6e-319)",
        ),
        (about(scored([None] * 4), model="own"), None),
        (about(scored([None] * 4), model="own", **ONE_PATH), None),
        # No answer has a remedy.
        (
            unanswered([None, None], ["eos", "eos"]),
            "no candidate states an answer: this is the last step of the best one; ask for one: "
            "--system-prompt 'Put your final answer within \\boxed{}.'",
        ),
        (unanswered([None], ["path_limit"]), "raise --max-rounds"),
        (unanswered([None], ["eos"], system_prompt="Think."), "more clearly"),
        (unanswered([None, "4"], ["eos", "round_limit"]), "no finished candidate states an answer"),
        # A verifier that trusts nobody; log-probabilities are no such scores.
        (trusted(2e-320, None, 0.0), "the verifier trusts no candidate (best score 2e-320)"),
        (trusted(0.2, 1e-9), None),
        (trusted(-3.5, -0.1), None),
        # A vote without another one, and copies.
        (votes(["1", "2", None]), LONELY),
        (votes(["1", None]), LONELY),
        (votes(["1", "1", "2"]), None),
        (votes(["1", "2"], "beam"), None),
        (copies("a", "a"), "all 2 candidates are the same text: --temperature 0"),
        (copies("a", "b"), None),
        (copies("a", "a", temperature=0.8), None),
    ],
)
def test_what_is_said(lines, words):
    assert len(lines) == (words is not None)
    assert all(words in line for line in lines)


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
