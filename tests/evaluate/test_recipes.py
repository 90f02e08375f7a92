"""Recipes of one and of several settings, and the recipes that come with the repository."""

from pathlib import Path

import pytest

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.evaluate.recipes import read_recipe
from beamwright.search.defaults import with_strategy_and_verifier
from tables import beside

SHIPPED = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def named(recipe):
    """Settings of a recipe's runs by name."""
    return lambda text, **given: {r.name: r.settings for r in read_recipe(recipe(text), given).runs}


def built(**options):
    return with_strategy_and_verifier(Settings.build(**options))


def test_a_single_run_has_no_name(named):
    (run,) = read_recipe(None, {"n": 8}).runs
    assert (run.name, run.settings) == (None, built(n=8))
    assert named("search: {n: 8, search: dvts}", n=4) == {None: built(n=4, search="dvts")}


def test_a_grid_is_every_combination_over_the_base(named):
    grid = "grid: {search: [beam, dvts], n: [4, 16]}"
    runs = named("base: {search: {width: 2}, seed: 3}\n" + grid)
    assert list(runs) == ["beam-n4", "beam-n16", "dvts-n4", "dvts-n16"]
    assert runs["dvts-n16"] == built(search="dvts", n=16, width=2, seed=3)
    # The command line goes first and takes its axis out.
    runs = named(grid, n=64)
    assert [(name, each.search.n) for name, each in runs.items()] == [("beam", 64), ("dvts", 64)]
    assert list(named(grid, n=64, search="beam")) == ["run"]


def test_named_settings_over_the_whole_grid(named):
    runs = named(
        "base: {search: {n: 8, width: 4}}\n"
        "settings:\n"
        "- {name: a, width: 2}\n"
        "- {name: b, schedule: {schedule: locality, prefetch: false}}\n"
        "grid: {seed: [0, 1]}"
    )
    assert list(runs) == ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]
    assert runs["a-seed1"] == built(n=8, width=2, seed=1)
    assert runs["b-seed0"] == built(n=8, schedule="locality", prefetch=False)


def test_a_setting_without_a_verifier_votes_and_says_so(recipe):
    path = recipe("grid: {verifier: [none, logprob]}\nbase: {search: majority}")
    assert all(run.note is None for run in read_recipe(path, {}).runs)  # as was asked for
    (run,) = read_recipe(recipe("model: {model: own}"), {"n": 8}).runs
    assert (run.settings.search.search, run.settings.model.verifier) == ("majority", "none")
    assert (
        "--model own runs without a verifier: the answer is a majority vote of 8 paths" in run.note
    )


def test_a_setting_that_needs_scores_is_refused_before_any_runs(recipe):
    both = "[{name: a, search: majority}, {name: b, search: beam}]"
    path = recipe(f"base: {{model: own}}\nsettings: {both}")
    with pytest.raises(InputError, match="setting 'b': --search beam needs scores"):
        read_recipe(path, {})


def test_the_problems_may_be_named(recipe):
    assert read_recipe(recipe("dataset: bundled:dev\ngrid: {n: [4]}"), {}).dataset == "bundled:dev"
    assert read_recipe(recipe("grid: {n: [4]}"), {}).dataset is None


def test_a_name_is_fit_for_a_folder(named):
    runs = named("grid: {model: ['hf:org/a b', ../x], temperature: [0.5]}")
    assert list(runs) == ["hf_org_a_b-temperature0.5", "x-temperature0.5"]


MISTAKES = beside(__file__)


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_are_one_line_that_names_the_place(recipe, text, message):
    with pytest.raises(InputError) as caught:
        read_recipe(recipe(text), {})
    line = str(caught.value)
    assert line.startswith("recipe ")
    assert message in line
    assert "\n" not in line


def test_every_shipped_recipe_is_described():
    described = (SHIPPED / "README.md").read_text()
    assert all(f"`{path.name}`" in described for path in SHIPPED.glob("*.yaml"))


def test_the_bundled_recipe_runs_every_strategy_that_grows_a_tree_of_its_own():
    from beamwright.search import STRATEGIES

    runs = read_recipe(SHIPPED / "bundled_methods.yaml", {}).runs
    # deepconf compares what `--verifier deepconf` says, not a reward model's scores.
    same_tree = {"majority", "weighted", "varying"}  # as best-of-n, and as beam here
    chat_only = {"revise", "aggregate"}  # the bundled model knows no such prompts
    assert {run.settings.search.search for run in runs} == set(
        STRATEGIES
    ) - same_tree - chat_only - {"deepconf"}
