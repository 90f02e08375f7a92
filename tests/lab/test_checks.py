"""Random option sets, all of them and the four papers': the plain tree, or one line."""

import pytest

from beamwright import Solver
from beamwright_lab.checks import options, papers
from engines import exact_dtype

PROBLEMS = [(f"p{k}", f"Ann has {k + 3} apples. She eats {k % 3}.") for k in range(3)]
SUITE, NIGHT, DRAWN, SEED = 2, 60, 200, 1


@pytest.fixture
def make(generator_folder, verifier_folder):
    """Solvers of the tiny model."""
    given = {"model": str(generator_folder), "verifier": str(verifier_folder)}
    given |= {"system_prompt": "", "dtype": exact_dtype()}
    return lambda **drawn: Solver(**{**given, **drawn})


@pytest.fixture
def tried(make):
    """Counts of so many sets, of which none may be bad."""

    def find(numbers):
        found = papers.run_sets(numbers, SEED, make, PROBLEMS)
        assert not found["bad"], found["bad"]
        assert set(found["counts"]) <= set(papers.GOOD)
        return found["counts"]

    return find


def test_some_sets(tried):
    assert tried(range(SUITE))


@pytest.mark.nightly
def test_a_token_that_its_tail_had_no_place_for(make):
    """Selected ahead, on a thread, it did not select itself."""
    decide = {"n": 12, "width": 4, "max_rounds": 5, "seed": 2**40, "temperature": 0.3}
    decide |= {"delimiter": "e", "sparse": "asyncspade", "select": 24, "sparse_from": 0}
    free = {"batching": "grouped", "write_back": "eager", "reuse": False, "split": "0.8"}
    found = papers.run_set(make, decide, {**free, "sparse_home": "host"}, 2, PROBLEMS)
    assert found == {"outcome": "equal"}


def test_every_option_of_the_papers_is_drawn():
    sets = [papers.draw_set(number, SEED) for number in range(DRAWN)]
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


# --- all options --------------------------------------------------------------------------------


def test_some_sets_of_all_options_on_a_tiny_model(generator_folder):
    found = options.run_random_sets(str(generator_folder), range(4), seed=1)
    assert found["ok"], found["bad"]
    assert found["counts"]["equal"] >= 2


@pytest.mark.parametrize(
    ("free", "outcome"),
    [
        ({"seed": [99], "temperature": [1.5]}, "unequal"),
        ({"kv_memory": [10]}, "least fails"),
        ({"kv_memory": [0.2]}, "capacity"),
    ],
)
def test_what_is_bad_is_found(generator_folder, monkeypatch, free, outcome):
    monkeypatch.setattr(options, "FREE", free)
    found = options.draw_and_run(str(generator_folder), 0, seed=1)
    assert found["outcome"] == outcome


@pytest.mark.nightly
def test_sets_on_a_published_model(smollm2):
    found = options.run_random_sets(str(smollm2), range(12), seed=0)
    assert found["ok"], found["bad"]


@pytest.mark.nightly
def test_many_sets_on_the_bundled_model():
    found = options.run_random_sets("bundled", range(60), seed=0)
    assert found["ok"], found["bad"]
    assert options.run_matrix("bundled")["ok"]
