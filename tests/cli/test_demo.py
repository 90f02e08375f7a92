import re

import pytest

from beamwright.cli.demo import ANSWER, PROBLEM


@pytest.mark.nightly
def test_search_is_right_and_a_vote_of_its_own_samples_is_not(cli):
    """In float64, where another CPU's rounding flips no token."""
    found = cli("demo", "--dtype", "float64", "--json").json
    search, vote = found["search"], found["vote"]
    assert (found["problem"], found["right"]) == (PROBLEM, ANSWER)
    assert search["answer"] == ANSWER
    assert vote["answer"] == "89"
    assert (search["seed"], vote["seed"]) == (1, 1)
    assert vote["settings"]["search"]["search"] == "majority"
    assert len(search["candidates"]) == len(vote["candidates"]) == 16
    assert search["tree_hash"] != vote["tree_hash"]


def test_without_a_terminal_it_is_one_sentence_that_judges_both(cli, fake):
    for answer, word in ((ANSWER, "right"), ("42", "wrong"), (None, "wrong")):
        fake.solution["answer"] = answer
        outcome = cli("demo")
        assert outcome.code == 0
        said = "no answer" if answer is None else answer
        assert outcome.out == (
            f"The search says {said}, which is {word}; a majority vote of 16 samples of the same "
            f"model says {said}, which is {word}.\n"
        )
    assert fake.calls == [PROBLEM] * 6


def test_a_terminal_sees_the_tree_grow(cli, fake, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", cli("demo").out)
    for text in ("Tim starts with 101 books.", "step 1.0", "Answer  42"):
        assert text in out
    assert out.splitlines()[-1].startswith("The search says 42, which is wrong;")


def test_seed_and_dtype_are_taken_and_nothing_else_of_a_search(cli, fake):
    assert cli("demo", "--seed", 3, "--dtype", "float64").code == 0
    search = fake.settings.search
    assert (search.n, search.width, search.seed) == (16, 4, 3)
    assert fake.settings.model.dtype == "float64"
