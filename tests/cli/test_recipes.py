"""Every recipe that ships runs to its end, with small models in the place of its own."""

from pathlib import Path

import pytest

from beamwright import Solver
from beamwright.errors import CapacityError
from beamwright.evaluate.recipes import read_recipe
from beamwright.schedule import SCHEDULES
from declared import restored

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
PLUGINS = {"flashtts_fig17": ROOT / "lab" / "beamwright_lab" / "flashtts" / "order.py"}
"""Recipes that name what no wheel has, and the file that they say to give."""


@pytest.fixture
def small(generator_folder):
    """What the command line substitutes: models, memory, and sizes that a CPU can afford."""
    return (
        *("--model", generator_folder, "--verifier", "logprob", "--device", "cpu"),
        *("--kv-memory", "64MiB", "--n", "4", "--seed", "0", "--limit", "1"),
        *("--max-tokens", "12", "--step-tokens", "6"),
    )


@pytest.mark.parametrize("recipe", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_a_shipped_recipe_runs_every_setting_and_can_be_reported(
    cli, small, verifier_folder, recipe, tmp_path
):
    dataset, out = tmp_path / "set.jsonl", tmp_path / "out"
    dataset.write_text('{"problem": "How many?", "answer": "1"}\n')
    given = ["--recipe", recipe, "--out", out, *small, "--json"]
    with restored():
        if recipe.stem in ("decoupled_chapter4", *PLUGINS):
            given += ["--verifier", verifier_folder]  # memory is split between two models
        if (plugin := PLUGINS.get(recipe.stem)) is not None:
            given += ["--plugin", plugin]
            for name in ("prefix", "random-order"):  # other tests have imported that file
                SCHEDULES.pop(name, None)
        found = cli("eval", dataset, *given).json
    for run in found["runs"]:
        assert "error" not in run, run
        assert (run["problems"], run["errors"]) == (1, 0)
        assert run["tokens"]["generated"] > 0
    report = cli("report", out, "--no-png", "--json").json
    assert {run["name"] for run in report["runs"]} == {run["name"] for run in found["runs"]}


@pytest.fixture
def solved(generator_folder):
    """Solutions by name of a recipe's settings, or no room: the tiny model, other options."""
    tiny = {"model": str(generator_folder), "verifier": "logprob", "device": "cpu"}
    tiny |= {"system_prompt": "", "dtype": "float64", "temperature": 1.0, "seed": 0}

    def find(name, text, **options):
        (path,) = [each for each in SHIPPED if each.stem == name]
        found = {}
        for run in read_recipe(path, {**tiny, **options}).runs:
            with Solver(run.settings) as solver:
                try:
                    found[run.name] = solver.solve(text)
                except CapacityError as error:
                    found[run.name] = error
        return found

    return find


def test_lbs_runs_each_part_of_the_paper(solved):
    """Groups with a copy per beam, then what is shared moves once, then it is kept and once."""
    size = {"kv_memory": "64KiB", "n": 8, "step_tokens": 8, "max_tokens": 40, "max_rounds": 5}
    found = solved("lbs", "Ann has 12 apples. She eats 3.", **size)
    assert isinstance(found.pop("in-gpu"), CapacityError)
    assert len({each.tree_hash for each in found.values()}) == 1
    kv, rounds = {name: each.kv for name, each in found.items()}, found["lbs"].rounds
    published = [kv[name] for name in ("inter-token", "inter-token-prefetch", "lbs")]
    assert all(each.groups > 2 * rounds for each in published)
    assert kv["inter-token"].h2d_bytes > kv["lbs"].h2d_bytes > 10 * kv["ranges"].h2d_bytes
    assert kv["ranges"].groups > rounds
    assert found["layerwise"].schedule == "layerwise"
    copies = {name for name, each in found.items() if each.attention == "dense"}
    assert copies == {"layerwise", "inter-token", "inter-token-prefetch", "lbs"}


def test_every_reading_of_asyncspade_selects_and_packs_change_nothing(solved):
    few = {"select": 24, "sparse_from": 0, "sparse_layers": 0, "n": 2}
    few |= {"step_tokens": 16, "max_tokens": 48, "max_rounds": 3}
    text = "Ann has 12 apples. She eats 3 and buys as many again. Then she eats 1, and buys more."
    found = solved("asyncspade", text, **few)
    assert all(each.sparse.tokens and each.sparse.selected_mean == 24 for each in found.values())
    packs = found.pop("packs")
    assert packs.kv.h2d_bytes > 0
    assert packs.tree_hash == found["asyncspade"].tree_hash
    assert len({each.tree_hash for each in found.values()}) >= len(found) - 1


@pytest.mark.nightly
def test_chapter_4_samples_nothing_past_its_depth(make_solver):
    """No end-of-sequence sampling (thesis, 4.3.4)."""
    (path,) = [each for each in SHIPPED if each.stem == "decoupled_chapter4"]
    endless = {"max_step_tokens": 6, "max_tokens": 999, "ignore_eos": True, "speculation": "exact"}
    trees = []
    for run in read_recipe(path, {"n": 4}).runs:
        asked, explore = run.settings.search, run.settings.schedule.explore
        if asked.search != "beam":
            continue  # without rounds there is nothing to wait for
        search = {"n": asked.n, "width": asked.width, "max_rounds": asked.max_rounds}
        with make_solver(search=asked.search, **search, **endless, explore=explore) as solver:
            found = solver.solve_many(["How many?", "How few?"])
        trees.append([each.tree_hash for each in found])
        assert max(node.depth for each in found for node in each.tree.nodes()) == 40
    assert trees == [trees[0]] * 6
