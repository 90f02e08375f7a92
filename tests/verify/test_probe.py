"""A head on the generator's hidden states: trained on a small run, and what it chooses."""

import io
import json
import shutil
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from beamwright import Settings, Solver
from beamwright.cli.app import main
from beamwright.errors import InputError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run
from engines import assert_same, exact_dtype

PROBLEM = (
    "Paul starts with 106 pears. Then in June Paul gives away 41 pears. Later in July Paul doubles "
    "the number of pears. How many pears does Paul have now?"
)
SEARCH = {"n": 8, "width": 2, "dtype": "float64", "temperature": 1.0}


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
        patched.setattr("beamwright.cli.app.installed", lambda group: found.get(group, []))
        yield


@pytest.fixture(scope="module")
def trained(finished, tmp_path_factory):
    """The file of a head, and what is said of it."""
    file, said = tmp_path_factory.mktemp("head") / "head.safetensors", io.StringIO()
    with redirect_stdout(said):
        assert main(["probe", "train", str(finished), "--out", str(file), "--json"]) == 0
    return file, json.loads(said.getvalue())


@pytest.fixture(scope="module")
def head(trained):
    return trained[0]


def solved(head, **options):
    with Solver(**{**SEARCH, "model": "bundled", "verifier": f"probe:{head}", **options}) as solver:
        return solver.solve(PROBLEM)


@pytest.fixture(scope="module")
def plain(head):
    return solved(head, drafts="off", speculation="off")


@pytest.mark.nightly
def test_training_reports_on_problems_that_it_has_not_seen(trained):
    file, report = trained
    assert sum(report["problems"].values()) == 24
    assert report["answers"]["paths"] == 4 * report["problems"]["reported"]
    assert 0 <= report["answers"]["auc"] <= 1
    assert report["steps"]["brier"] < 1
    with safe_open(file, "pt") as stored:
        assert json.loads(stored.metadata()["report"])["answers"] == report["answers"]


def test_no_second_model_is_loaded_and_no_token_read(plain):
    assert plain.cache.verifier is None
    assert plain.tokens.verifier_prefilled == 0
    scores = [score for each in plain.candidates for score in each.step_scores]
    assert all(0 <= score <= 1 for score in scores)
    assert len({round(score, 6) for score in scores}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": "400KiB"},
        {"speculation": "exact"},
        {"batching": "grouped", "max_batch": 3},
        {"drafts": "auto"},
        {"attention": "reference"},
    ],
    ids=str,
)
def test_trees_and_scores_do_not_depend_on_the_schedule(head, plain, options):
    found = solved(head, **options)
    assert found.tree_hash == plain.tree_hash
    for one, other in zip(found.candidates, plain.candidates, strict=True):
        assert one.step_scores == pytest.approx(other.step_scores, abs=1e-9)


def test_scores_have_equal_bits_beside_other_problems(head):
    settings = {**SEARCH, "dtype": "float32", "model": "bundled", "verifier": f"probe:{head}"}
    with Solver(**settings) as solver:
        alone = solver.solve(PROBLEM, problem_id="p")
        others = [(number, PROBLEM.replace("41", str(number))) for number in (12, 13)]
        beside = solver.solve_many([*others, ("p", PROBLEM)])[-1]
    assert alone.exact or exact_dtype() == "float64"
    assert_same(beside, alone)


def test_a_resumed_search_grows_the_same_tree(head, plain, tmp_path):
    file = tmp_path / "search.json"
    saved = []

    def copy(report):
        saved.append(shutil.copy(file, tmp_path / f"round-{report.round}.json"))

    options = {**SEARCH, "model": "bundled", "verifier": f"probe:{head}"}
    with Solver(**options) as solver:
        solver.solve(PROBLEM, checkpoint=file, on_round=copy)
    with Solver(**options) as solver:
        resumed = solver.resume(saved[1])
    assert resumed.tree_hash == plain.tree_hash
    assert [c.score for c in resumed.candidates] == [c.score for c in plain.candidates]


def test_steps_in_between_count_where_every_second_one_is_scored(head):
    found = solved(head, search="best-of-n", verify_every=2)
    every = solved(head, search="best-of-n")
    assert found.tree_hash == every.tree_hash
    for one, other in zip(found.candidates, every.candidates, strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-6)


# --- what is refused -------------------------------------------------------------------------


def refused(verifier, model="bundled"):
    with pytest.raises(InputError) as caught:
        Solver(model=model, verifier=verifier)
    return str(caught.value)


def test_the_head_of_another_generator(head):
    line = refused(f"probe:{head}", "bundled:strong")
    assert "reads hidden states of the generator bundled; the files of --model" in line


def test_a_head_that_is_not_there_or_damaged_or_of_another_format(head, tmp_path):
    assert "no such file" in refused(f"probe:{tmp_path}/none")
    assert "write probe:HEAD" in refused("probe:")
    torn = tmp_path / "torn"
    torn.write_bytes(head.read_bytes()[:-100])
    assert "cannot be read" in refused(f"probe:{torn}")
    other = tmp_path / "other"
    save_file({"x": torch.ones(1)}, other)
    assert "no head of `beamwright probe train`" in refused(f"probe:{other}")
    tensors = load_file(head)
    with safe_open(head, "pt") as stored:
        facts = stored.metadata()
    save_file({**tensors, "layers.0.bias": torch.ones(3)}, other, facts)
    assert "is damaged" in refused(f"probe:{other}")


def test_a_generator_elsewhere_gives_no_hidden_states(head, tmp_path, capsys):
    words = ["solve", "1 + 1", "--model", "openai:http://127.0.0.1:9/v1", "--tokenizer", "bundled"]
    assert main([*words, "--verifier", f"probe:{head}"]) == 2
    assert "hidden states" in capsys.readouterr().err


def test_given_steps_have_no_hidden_states(head):
    line = pytest.raises(InputError, match="what the generator drew")
    with Solver(model="bundled", verifier=f"probe:{head}") as solver, line:
        solver.score(PROBLEM, ["June: Paul 106-41=65."])


def test_runs_without_paths_or_of_few_problems(finished, tmp_path, capsys):
    few = shutil.copytree(finished, tmp_path / "few")
    lines = (finished / "results.jsonl").read_text().splitlines(keepends=True)
    (few / "results.jsonl").write_text("".join(lines[:5]))
    assert main(["probe", "train", str(few), "--out", str(tmp_path / "head")]) == 2
    assert "5 problems with paths; 20 or more are needed" in capsys.readouterr().err
    records = [{**json.loads(line), "prompt_ids": []} for line in lines[:2]]
    (few / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    assert main(["probe", "train", str(few), "--out", str(tmp_path / "head")]) == 2
    assert "holds no paths; it has to be a run of `eval --paths`" in capsys.readouterr().err
