"""Random settings over the four papers' options: the plain tree, or one line (`checks.papers`)."""

from functools import partial

import pytest

from beamwright import Solver
from beamwright_lab.checks import papers
from engines import exact_dtype

PROBLEMS = [(f"p{k}", f"Ann has {k + 3} apples. She eats {k % 3}.") for k in range(3)]
SUITE, NIGHT, DRAWN, SEED = 4, 60, 200, 1


@pytest.fixture
def make(generator_folder, verifier_folder):
    """Solvers of the tiny model."""
    options = {"model": str(generator_folder), "verifier": str(verifier_folder)}
    return partial(_made, options | {"system_prompt": "", "dtype": exact_dtype()})


@pytest.fixture
def tried(make):
    """Counts of so many sets, of which none may be bad."""

    def find(numbers):
        found = papers.run(numbers, SEED, make, PROBLEMS)
        assert not found["bad"], found["bad"]
        assert set(found["counts"]) <= set(papers.GOOD)
        return found["counts"]

    return find


def _made(options, **drawn):
    return Solver(**{**options, **drawn})


def test_some_sets(tried):
    assert tried(range(SUITE))["equal"] >= 1


def test_a_token_that_its_tail_had_no_place_for(make):
    """Selected ahead, on a thread, it did not select itself."""
    decide = {"n": 12, "width": 4, "max_rounds": 5, "seed": 2**40, "temperature": 0.3}
    decide |= {"delimiter": "e", "sparse": "asyncspade", "select": 24, "sparse_from": 0}
    free = {"batching": "grouped", "write_back": "eager", "reuse": False, "split": "0.8"}
    found = papers.tried(make, decide, {**free, "sparse_home": "host"}, 2, PROBLEMS)
    assert found == {"outcome": "equal"}


def test_every_option_of_the_papers_is_drawn():
    sets = [papers.drawn(number, SEED) for number in range(DRAWN)]
    free = {name: {each.get(name) for _, each, _ in sets} for name in papers.FREE}
    for name, values in papers.FREE.items():
        assert {each for each in values if each is not None} <= free[name], name
    methods = " ".join(decide.get("sparse", "") for decide, _, _ in sets)
    for part in ("pack=", "share=2", "each=query", "window=path", "quest", "ahead-pages"):
        assert part in methods
    truncated = [decide for decide, each, _ in sets if each.get("speculation") == "truncate"]
    assert any("window=path" in decide.get("sparse", "") for decide in truncated)


@pytest.mark.nightly
def test_many_sets(tried):
    assert tried(range(SUITE, NIGHT))["equal"] >= NIGHT // 3
