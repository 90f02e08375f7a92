"""Random settings over the four papers' options: the plain tree, or one line (`checks.papers`)."""

from functools import partial

import pytest

from beamwright import Solver
from beamwright_lab.checks.papers import GOOD, run
from engines import exact_dtype

PROBLEMS = [(f"p{k}", f"Ann has {k + 3} apples. She eats {k % 3}.") for k in range(3)]
SUITE, NIGHT, SEED = 6, 200, 1


@pytest.fixture
def tried(generator_folder, verifier_folder):
    """Counts of so many sets on the tiny model, of which none may be bad."""

    def find(numbers):
        options = {"model": str(generator_folder), "verifier": str(verifier_folder)}
        options |= {"system_prompt": "", "dtype": exact_dtype()}
        make = partial(_made, options)
        found = run(numbers, SEED, make, PROBLEMS)
        assert not found["bad"], found["bad"]
        assert set(found["counts"]) <= set(GOOD)
        return found["counts"]

    return find


def _made(options, **drawn):
    return Solver(**{**options, **drawn})


def test_some_sets(tried):
    assert tried(range(SUITE))["equal"] >= SUITE // 3


def test_a_token_that_its_tail_had_no_place_for(tried):
    """Selected ahead, on a thread, it did not select itself."""
    assert tried([71]) == {"equal": 1}


@pytest.mark.nightly
def test_many_sets(tried):
    assert tried(range(SUITE, NIGHT))["equal"] >= NIGHT // 3
