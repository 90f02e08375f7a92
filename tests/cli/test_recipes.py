"""Every recipe that ships runs to its end, with small models in the place of its own."""

from pathlib import Path

import pytest

from beamwright.evaluate.recipes import read_recipe

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def small(generator_folder):
    """What the command line substitutes: models, memory, and sizes that a CPU can afford."""
    return (
        *("--model", generator_folder, "--verifier", "logprob", "--device", "cpu"),
        *("--kv-memory", "64MiB", "--n", "4", "--seed", "0", "--limit", "1"),
        *("--max-tokens", "12", "--step-tokens", "6"),
    )


@pytest.mark.parametrize("recipe", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_a_shipped_recipe_runs_every_setting_and_can_be_reported(cli, small, recipe, tmp_path):
    dataset, out = tmp_path / "set.jsonl", tmp_path / "out"
    dataset.write_text('{"problem": "How many?", "answer": "1"}\n')
    found = cli("eval", dataset, "--recipe", recipe, "--out", out, *small, "--json").json
    for run in found["runs"]:
        assert "error" not in run, run
        assert (run["problems"], run["errors"]) == (1, 0)
        assert run["tokens"]["generated"] > 0
    report = cli("report", out, "--no-png", "--json").json
    assert {run["name"] for run in report["runs"]} == {run["name"] for run in found["runs"]}


def test_chapter_4_samples_nothing_past_its_depth(make_solver):
    """No end-of-sequence sampling (thesis, 4.3.4)."""
    (path,) = [each for each in SHIPPED if each.stem == "decoupled_chapter4"]
    endless = {"max_step_tokens": 6, "max_tokens": 999, "ignore_eos": True, "speculation": "exact"}
    trees = []
    for run in read_recipe(path, {"n": 4}).runs:
        asked, explore = run.settings.search, run.settings.schedule.explore
        search = {"n": asked.n, "width": asked.width, "max_rounds": asked.max_rounds}
        with make_solver(search=asked.search, **search, **endless, explore=explore) as solver:
            found = solver.solve_many(["How many?", "How few?"])
        trees.append([each.tree_hash for each in found])
        assert max(node.depth for each in found for node in each.tree.nodes()) == 40
    assert trees[0] == trees[1] == trees[2]
