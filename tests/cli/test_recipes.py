"""Every recipe that ships runs to its end, with small models in the place of its own."""

from pathlib import Path

import pytest

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
