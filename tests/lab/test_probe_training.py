"""`beamwright probe train`: a head from a small run, and runs that no head can be of."""

import io
import json
import shutil
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint

import pytest
from safetensors.torch import safe_open

from beamwright import Settings, Solver
from beamwright.cli.app import main
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a few problems, with its paths."""
    out = tmp_path_factory.mktemp("run")
    settings = Settings.build(model="bundled", verifier="none", search="majority", n=4)
    with Solver(settings) as solver, AnswerChecker() as checker:
        problems = load_problems("bundled:dev", 24)

        def solve(pairs):
            return solver.solve_many(pairs, in_flight="auto")

        run(problems, solve, settings, checker, out, paths=True)
    return out


@pytest.fixture(scope="module", autouse=True)
def probe_command():
    """The lab's, wherever it is installed."""
    point = EntryPoint("probe", "beamwright_lab.commands.probe:probe", "beamwright.commands")
    with pytest.MonkeyPatch.context() as patched:
        found = {point.group: [point]}
        patched.setattr(
            "beamwright.cli.app.installed_entry_points", lambda group: found.get(group, [])
        )
        yield


@pytest.fixture(scope="module")
def trained(finished, tmp_path_factory):
    """The file of a head, and what is said of it."""
    file, said = tmp_path_factory.mktemp("head") / "head.safetensors", io.StringIO()
    with redirect_stdout(said):
        assert main(["probe", "train", str(finished), "--out", str(file), "--json"]) == 0
    return file, json.loads(said.getvalue())


def test_training_reports_on_problems_that_it_has_not_seen(trained):
    file, report = trained
    assert sum(report["problems"].values()) == 24
    assert report["answers"]["paths"] == 4 * report["problems"]["reported"]
    assert 0 <= report["answers"]["auc"] <= 1
    assert report["steps"]["brier"] < 1
    with safe_open(file, "pt") as stored:
        assert json.loads(stored.metadata()["report"])["answers"] == report["answers"]


def test_runs_without_paths_or_of_few_problems(finished, tmp_path, capsys):
    few = shutil.copytree(finished, tmp_path / "few")
    lines = (finished / "results.jsonl").read_text().splitlines(keepends=True)
    (few / "results.jsonl").write_text("".join(lines[:5]))
    assert main(["probe", "train", str(few), "--out", str(tmp_path / "head")]) == 2
    assert "5 problems with paths; at least 20 are needed" in capsys.readouterr().err
    records = [{**json.loads(line), "prompt_ids": []} for line in lines[:2]]
    (few / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    assert main(["probe", "train", str(few), "--out", str(tmp_path / "head")]) == 2
    assert "holds no paths; run `eval` with --paths" in capsys.readouterr().err
