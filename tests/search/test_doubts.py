"""What is said of scores that guided nothing, and of answers that nobody stated."""

import pytest

from beamwright.config import Settings
from beamwright.evaluate.problems import BUNDLED, load_problems
from beamwright.search.defaults import with_defaults
from beamwright.search.doubts import (
    GRAMMAR,
    doubts_about_answers,
    doubts_about_low_scores,
    doubts_about_problem,
    doubts_about_sampling,
    doubts_about_scores,
    doubts_about_votes,
)
from played import first_round
from tables import beside

CASES = beside(__file__)


def scored(scores):
    """A tree of one round, with these step scores."""
    tree, nodes = first_round(scores)
    for node in nodes:
        node.step_score = node.score
    return tree


def doubts_of(kind, given, options):
    """Lines about what is given; the scores' and the trust's settings have defaults filled in."""
    settings = Settings.build(**options)
    match kind:
        case "scores":
            return doubts_about_scores(scored(given), with_defaults(settings))
        case "trust":
            return doubts_about_low_scores(given, with_defaults(settings))
        case "answers":
            return doubts_about_answers(*given, settings)
        case "votes":
            return doubts_about_votes(given, "1", settings)
        case "copies":
            return doubts_about_sampling(given, settings)


@pytest.mark.parametrize(("kind", "given", "options", "words"), CASES["said"])
def test_what_is_said(kind, given, options, words):
    lines = doubts_of(kind, given, options)
    assert len(lines) == (words is not None)
    assert all(words in line for line in lines)


@pytest.mark.parametrize("problem", CASES["known"])
def test_the_bundled_models_know_such_problems(problem):
    assert doubts_about_problem(problem, Settings.build()) == []


@pytest.mark.parametrize(
    "problem",
    [
        *CASES["others"],
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
