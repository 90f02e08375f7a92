import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import beamwright.errors
from beamwright.config import Settings
from beamwright.declare import verifier
from beamwright.errors import CapacityError, InputError, ProblemTooLongError, UnavailableError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run
from declared import restored

IDS = [f"id{i}" for i in range(5)]


@pytest.fixture
def problem_set(write_jsonl):
    return load_problems(write_jsonl(*({"problem": "p", "answer": "1", "id": i} for i in IDS)))


@pytest.fixture
def solve(problem_set, fake_solver, checker):
    """Runs five problems with the scripted solver, unless told otherwise."""

    def make(problems=problem_set, solver=fake_solver, settings=None, **options):
        return run(problems, solver, settings or Settings(), checker, **options)

    return make


@pytest.fixture
def kept(solve, tmp_path):
    """The same with a folder."""
    return partial(solve, out=tmp_path / "out")


@pytest.fixture
def lines(tmp_path):
    """What is on disk."""
    results = tmp_path / "out" / "results.jsonl"
    return lambda: [json.loads(line) for line in results.read_text().splitlines()]


def test_a_truncated_answer_does_not_vote_and_candidates_may_be_missing(
    fake_solver, make_solution, solve
):
    stops = ["path_limit", "path_limit", "eos"]
    fake_solver.outcomes["id0"] = make_solution(["2", "2", "1"], [0.9, 0.9, 0.1], stops)
    fake_solver.outcomes["id1"] = make_solution([], reason_fewer="nothing finished")
    report = solve()
    assert (report["by_choice"]["majority"], report["fewer_candidates"]) == (0.8, 1)


def test_a_larger_limit_goes_on_and_progress_starts_with_what_was_finished(
    problem_set, fake_solver, kept
):
    assert kept(load_problems(problem_set.name, 2))["problems"] == 2
    seen = []
    report = kept(on_record=lambda record, done, total: seen.append((done, total)))
    assert report["problems"] == 5
    assert fake_solver.asked == IDS
    assert seen == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize("keep", [1, 60, -1])
def test_a_torn_last_line_is_dropped(fake_solver, kept, lines, tmp_path, keep):
    first = kept()
    results = tmp_path / "out" / "results.jsonl"
    *whole, last = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(whole) + last[:keep])
    fake_solver.asked.clear()
    assert kept() == first
    assert fake_solver.asked == ["id4"]
    assert [line["unique_id"] for line in lines()] == IDS


def test_damage_elsewhere_is_an_error(kept, tmp_path):
    kept()
    results = tmp_path / "out" / "results.jsonl"
    whole = results.read_text().splitlines(keepends=True)
    for damaged, message in [
        (["{oops\n", *whole[1:]], "line 1: not the JSON"),
        (["{}\n", *whole[1:]], "line 1: not a result"),
        ([whole[0], *whole], "line 2: 'id0' appears twice"),
    ]:
        results.write_text("".join(damaged))
        with pytest.raises(InputError, match=message):
            kept()
        assert results.read_text() == "".join(damaged)


def test_other_data_in_the_same_folder_or_no_settings(problem_set, kept, tmp_path, write_jsonl):
    kept()
    write_jsonl({"problem": "changed"})
    with pytest.raises(InputError, match="dataset_sha256 was"):
        kept(load_problems(problem_set.name))
    (tmp_path / "out" / "settings.json").unlink()
    with pytest.raises(InputError, match=r"settings\.json: cannot be read"):
        kept()


def test_an_answer_that_the_checker_gave_up_on_is_wrong_and_told(
    fake_solver, make_solution, kept, lines, monkeypatch
):
    fake_solver.outcomes["id0"] = make_solution(["9^{9^{9^{9}}}+x"])
    monkeypatch.setattr(AnswerChecker, "_ask", lambda *pair: None)
    report = kept()
    assert (report["correct"], report["warnings"]["problems"]) == (4, 1)
    assert "timed out on 9^{9^{9^{9}}}+x" in lines()[0]["warnings"][0]


def test_a_folder_without_any_finished_problem_takes_other_settings(kept):
    def refuse(problems):
        raise InputError("--model: no such folder")

    with pytest.raises(InputError, match="--model"):
        kept(solver=refuse, settings=Settings.build(model="nowhere"))
    assert kept()["problems"] == 5


def test_a_folder_that_cannot_be_used(kept, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="--out"):
        kept()


def test_two_runs_at_once_in_one_folder(fake_solver, kept):
    def twice(problems):
        with pytest.raises(InputError, match="another run is writing"):
            kept()
        yield from fake_solver(problems)

    assert kept(solver=twice)["problems"] == 5


@pytest.mark.parametrize("error", [CapacityError("a step", 2, 1, 1), UnavailableError("gone")])
def test_what_is_no_problems_fault_ends_the_run_which_goes_on_later(
    fake_solver, kept, lines, error
):
    fake_solver.outcomes.update(dict.fromkeys(("id3", "id4"), error))
    with pytest.raises(type(error)):
        kept()
    assert [line["unique_id"] for line in lines()] == IDS[:3]
    fake_solver.outcomes.clear()
    assert kept()["correct"] == 5


@pytest.mark.parametrize("error", [ProblemTooLongError("it", 9, 8), UnavailableError("too long")])
def test_who_fails_where_others_are_answered_has_failed(fake_solver, kept, lines, error):
    fake_solver.outcomes["id1"] = error
    report = kept()
    assert (report["errors"], report["correct"], report["accuracy"]) == (1, 4, 0.8)
    assert {line["unique_id"]: line["error"] for line in lines()}["id1"] == str(error)


def test_right_candidates_are_counted_if_they_ended_by_themselves(
    fake_solver, make_solution, kept, lines
):
    stops = ["eos", "eos", "path_limit", "eos"]
    fake_solver.outcomes["id0"] = make_solution(["1", "2", "1", "1.0"], stops=stops)
    fake_solver.outcomes["id1"] = ProblemTooLongError("it", 9, 8)
    report = kept(settings=Settings.build(n=4))
    assert [line["num_correct"] for line in lines()] == [2, 0, 1, 1, 1]
    # One candidate of the four that were asked for stands for three problems.
    assert report["pass_at"]["1"]["value"] == pytest.approx((2 / 4 + 0 + 3 * 1 / 4) / 5)
    assert report["per_problem"]["kv_device_peak_bytes"]["value"] == 1024


KILLED_SCRIPT = """
import json, sys, time
from pathlib import Path
from beamwright.config import Settings
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run

class Solution:
    def to_json(self):
        return json.loads(Path("solution.json").read_text())

def solve_many(problems):
    for unique_id, _ in problems:
        time.sleep(0.02)
        yield unique_id, Solution()

def show(record, done, total):
    print(done, flush=True)

options = {"out": Path("out"), "on_record": show}
problems = load_problems("set.jsonl")
print(run(problems, solve_many, Settings(), AnswerChecker(), **options)["problems"])
"""


def test_killed_at_any_moment_every_problem_is_there_exactly_once(
    tmp_path, write_jsonl, make_solution, lines
):
    write_jsonl(*({"problem": "the same", "answer": "1"} for _ in range(30)))
    (tmp_path / "solution.json").write_text(json.dumps(make_solution(["1"] * 50).to_json()))
    source = Path(beamwright.errors.__file__).parents[1]
    command = [sys.executable, "-c", KILLED_SCRIPT]
    started = dict(cwd=tmp_path, text=True, env={**os.environ, "PYTHONPATH": str(source)})
    with subprocess.Popen(command, stdout=subprocess.PIPE, **started) as process:
        while int(process.stdout.readline()) < 5:
            pass
        process.send_signal(signal.SIGKILL)
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    assert 5 <= (tmp_path / "out" / "results.jsonl").read_bytes().count(b"\n") < 30
    # What a kill inside write() would leave.
    with (tmp_path / "out" / "results.jsonl").open("ab") as results:
        results.write(b'{"unique_id": "29", "ind')
    done = subprocess.run(command, capture_output=True, check=True, **started)
    assert done.stdout.split()[-1] == "30"
    ids = [line["unique_id"] for line in lines()]
    assert sorted(ids, key=int) == [str(i) for i in range(30)]


def test_a_run_goes_on_with_the_code_that_it_began_with(kept, lines):
    settings = Settings.build(verifier="scored")
    for scored, words in (
        (lambda problem, steps: 1, None),
        (lambda problem, steps: 1, None),
        (lambda problem, steps: 2, "code.verifier_code was"),
    ):
        with restored():
            verifier("scored", meaning="x")(scored)
            if words is None:
                kept(settings=settings)
                continue
            with pytest.raises(InputError, match=words):
                kept(settings=settings)
    assert len(lines()) == 5
