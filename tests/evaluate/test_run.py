import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import beamwright.errors
from beamwright.config import Settings
from beamwright.declare import verifier
from beamwright.errors import CapacityError, InputError, ProblemTooLongError, UnavailableError
from beamwright.evaluate import RunOptions, load_problems, run
from beamwright.evaluate.results import find_runs
from beamwright.registry import restored


@pytest.fixture
def problem_set(write_jsonl):
    lines = [{"problem": f"p{i}", "answer": "1", "unique_id": f"id{i}"} for i in range(5)]
    return load_problems(write_jsonl(*lines))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_reports_the_contract(problem_set, fake_solver, make_solution, checker):
    fake_solver.outcomes["id1"] = make_solution(["2", "1", "1"], [0.9, 0.4, 0.4])
    report = run(problem_set, fake_solver, Settings(), checker=checker)
    assert report["dataset"] == problem_set.name
    assert (report["problems"], report["correct"], report["accuracy"]) == (5, 4, 0.8)
    assert report["by_choice"] == {"best": 0.8, "majority": 1.0, "weighted": 0.8}
    assert report["tokens"] == {"generated": 150, "kept": 100, "speculated": None}
    assert report["time"] == {"total_s": 7.5, "decode_s": 5.0, "stall_s": None}
    assert (report["mean_rounds"], report["goodput_tok_s"]) == (3, 10.0)
    assert report["settings"]["search"]["n"] == 16
    assert (fake_solver.asked, fake_solver.in_flight) == ([f"id{i}" for i in range(5)], "auto")
    json.dumps(report)


def test_a_truncated_answer_does_not_vote(problem_set, fake_solver, make_solution, checker):
    stops = ["path_limit", "path_limit", "eos"]
    fake_solver.outcomes["id0"] = make_solution(["2", "2", "1"], [0.9, 0.9, 0.1], stops)
    report = run(problem_set, fake_solver, Settings(), checker=checker)
    assert report["by_choice"]["majority"] == 1.0


def test_candidates_may_be_missing(problem_set, fake_solver, make_solution, checker):
    fake_solver.outcomes["id0"] = make_solution([], reason_fewer="nothing finished")
    report = run(problem_set, fake_solver, Settings(), checker=checker)
    assert (report["correct"], report["fewer_candidates"]) == (4, 1)


def test_problems_with_bad_input_are_recorded_as_wrong(problem_set, fake_solver, tmp_path, checker):
    fake_solver.outcomes["id2"] = ProblemTooLongError("too long")
    out = tmp_path / "out"
    report = run(problem_set, fake_solver, Settings(), RunOptions(out=out), checker)
    assert (report["errors"], report["correct"], report["accuracy"]) == (1, 4, 0.8)
    assert lines_of(out)[2]["error"] == "too long"


def test_text_that_is_not_unicode_is_kept(write_jsonl, fake_solver, tmp_path, checker):
    odd = load_problems(write_jsonl('{"problem": "\\ud800 \u00e9", "answer": "1"}'))
    options = RunOptions(out=tmp_path / "out")
    first = run(odd, fake_solver, Settings(), options, checker)
    assert run(odd, fake_solver, Settings(), options, checker) == first
    assert lines_of(tmp_path / "out")[0]["problem"] == "\ud800 \u00e9"


def test_in_flight(problem_set, fake_solver, checker):
    run(problem_set, fake_solver, Settings(), RunOptions(in_flight=2), checker)
    assert fake_solver.in_flight == 2
    with pytest.raises(InputError, match="--in-flight"):
        run(problem_set, fake_solver, Settings(), RunOptions(in_flight=0), checker)


def test_a_finished_run_solves_nothing_again(problem_set, fake_solver, tmp_path, checker):
    options = RunOptions(out=tmp_path / "out")
    first = run(problem_set, fake_solver, Settings(), options, checker)
    again = run(problem_set, fake_solver, Settings(), options, checker)
    assert again == first
    assert len(fake_solver.asked) == 5


def test_what_is_kept_is_its_users_alone(problem_set, fake_solver, tmp_path, checker):
    run(problem_set, fake_solver, Settings(), RunOptions(tmp_path / "out"), checker)
    kept = {file.name: file.stat().st_mode & 0o077 for file in (tmp_path / "out").iterdir()}
    assert kept == {"results.jsonl": 0, "settings.json": 0}


def test_a_larger_limit_goes_on(problem_set, fake_solver, tmp_path, checker):
    options = RunOptions(out=tmp_path / "out")
    assert (
        run(load_problems(problem_set.name, 2), fake_solver, Settings(), options, checker)[
            "problems"
        ]
        == 2
    )
    assert run(problem_set, fake_solver, Settings(), options, checker)["problems"] == 5
    assert fake_solver.asked == [f"id{i}" for i in range(5)]


def test_progress_starts_with_what_was_finished(problem_set, fake_solver, tmp_path, checker):
    out = tmp_path / "out"
    run(load_problems(problem_set.name, 2), fake_solver, Settings(), RunOptions(out=out), checker)
    seen = []
    options = RunOptions(out=out, on_record=lambda r, done, total: seen.append((done, total)))
    run(problem_set, fake_solver, Settings(), options, checker)
    assert seen == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize("keep", [1, 60, -1])
def test_a_torn_last_line_is_dropped(problem_set, fake_solver, tmp_path, checker, keep):
    options = RunOptions(out=tmp_path / "out")
    first = run(problem_set, fake_solver, Settings(), options, checker)
    results = tmp_path / "out" / "results.jsonl"
    *whole, last = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(whole) + last[:keep])
    fake_solver.asked.clear()
    assert run(problem_set, fake_solver, Settings(), options, checker) == first
    assert fake_solver.asked == ["id4"]
    assert [line["unique_id"] for line in lines_of(tmp_path / "out")] == [
        f"id{i}" for i in range(5)
    ]


def test_damage_elsewhere_is_an_error(problem_set, fake_solver, tmp_path, checker):
    options = RunOptions(out=tmp_path / "out")
    run(problem_set, fake_solver, Settings(), options, checker)
    results = tmp_path / "out" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    for damaged, message in [
        (["{oops\n", *lines[1:]], "line 1: not JSON"),
        (["{}\n", *lines[1:]], "line 1: not a result"),
        ([lines[0], *lines], "line 2: 'id0' appears twice"),
    ]:
        results.write_text("".join(damaged))
        with pytest.raises(InputError, match=message):
            run(problem_set, fake_solver, Settings(), options, checker)
        assert results.read_text() == "".join(damaged)


def test_other_settings_or_data_in_the_same_folder(
    problem_set, fake_solver, tmp_path, checker, write_jsonl
):
    options = RunOptions(out=tmp_path / "out")
    run(problem_set, fake_solver, Settings(), options, checker)
    with pytest.raises(InputError, match=r"settings\.search\.n was 16, is 8"):
        run(problem_set, fake_solver, Settings.build(n=8), options, checker)
    write_jsonl({"problem": "changed"})
    with pytest.raises(InputError, match="dataset_sha256 was"):
        run(load_problems(problem_set.name), fake_solver, Settings(), options, checker)
    (tmp_path / "out" / "settings.json").unlink()
    with pytest.raises(InputError, match=r"results\.jsonl without settings\.json"):
        run(problem_set, fake_solver, Settings(), options, checker)


def test_a_folder_without_any_finished_problem_takes_other_settings(
    problem_set, fake_solver, tmp_path, checker
):
    options = RunOptions(out=tmp_path / "out")

    def solve(problems, *, in_flight):
        raise InputError("--model: no such folder")

    with pytest.raises(InputError, match="--model"):
        run(problem_set, solve, Settings.build(model="nowhere"), options, checker)
    assert run(problem_set, fake_solver, Settings(), options, checker)["problems"] == 5


def test_a_folder_that_cannot_be_used(problem_set, fake_solver, tmp_path, checker):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="--out"):
        run(problem_set, fake_solver, Settings(), RunOptions(out=tmp_path / "out"), checker)


def test_two_runs_at_once_in_one_folder(problem_set, fake_solver, tmp_path, checker):
    options = RunOptions(out=tmp_path / "out")

    def solve(problems, *, in_flight):
        with pytest.raises(InputError, match="another run is writing"):
            run(problem_set, fake_solver, Settings(), options, checker)
        yield from fake_solver(problems, in_flight=in_flight)

    assert run(problem_set, solve, Settings(), options, checker)["problems"] == 5


def test_capacity_errors_keep_what_was_finished(problem_set, fake_solver, tmp_path, checker):
    full = CapacityError("a step", 2, 1, 1)
    fake_solver.outcomes["id3"] = full
    options = RunOptions(out=tmp_path / "out", in_flight=2)
    with pytest.raises(CapacityError):
        run(problem_set, fake_solver, Settings(), options, checker)
    assert [line["unique_id"] for line in lines_of(tmp_path / "out")] == ["id0", "id1", "id2"]
    del fake_solver.outcomes["id3"]
    assert run(problem_set, fake_solver, Settings(), options, checker)["correct"] == 5


def test_who_fails_where_others_are_answered_has_failed(
    problem_set, fake_solver, tmp_path, checker
):
    fake_solver.outcomes["id1"] = UnavailableError("gone for this one")
    options = RunOptions(out=tmp_path / "out")
    report = run(problem_set, fake_solver, Settings(), options, checker)
    assert (report["errors"], report["correct"]) == (1, 4)
    by_id = {line["unique_id"]: line.get("error") for line in lines_of(tmp_path / "out")}
    assert by_id["id1"] == "gone for this one"


def test_where_nobody_is_answered_any_more_the_run_ends_and_goes_on_later(
    problem_set, fake_solver, tmp_path, checker
):
    gone = UnavailableError("gone")
    fake_solver.outcomes.update(dict.fromkeys(("id3", "id4"), gone))
    options = RunOptions(out=tmp_path / "out")
    with pytest.raises(UnavailableError):
        run(problem_set, fake_solver, Settings(), options, checker)
    assert [line["unique_id"] for line in lines_of(tmp_path / "out")] == ["id0", "id1", "id2"]
    fake_solver.outcomes.clear()
    assert run(problem_set, fake_solver, Settings(), options, checker)["correct"] == 5


def test_right_candidates_are_counted_if_they_ended_by_themselves(
    problem_set, fake_solver, make_solution, tmp_path, checker
):
    stops = ["eos", "eos", "path_limit", "eos"]
    fake_solver.outcomes["id0"] = make_solution(["1", "2", "1", "1.0"], stops=stops)
    fake_solver.outcomes["id1"] = ProblemTooLongError("too long")
    options = RunOptions(out=tmp_path / "out")
    report = run(problem_set, fake_solver, Settings.build(n=4), options, checker)
    assert [line["num_correct"] for line in lines_of(tmp_path / "out")] == [2, 0, 1, 1, 1]
    # One candidate of the four that were asked for stands for three problems.
    assert report["pass_at"]["1"]["value"] == pytest.approx((2 / 4 + 0 + 3 * 1 / 4) / 5)
    assert report["per_problem"]["kv_device_peak_bytes"]["value"] == 1024


def test_nothing_is_counted_where_nobody_knows_what_is_right(
    write_jsonl, fake_solver, tmp_path, checker
):
    unknown = load_problems(write_jsonl({"problem": "p"}))
    report = run(unknown, fake_solver, Settings(), RunOptions(out=tmp_path / "out"), checker)
    assert lines_of(tmp_path / "out")[0]["num_correct"] is None
    assert report["pass_at"]["16"] is report["top1"]["best"] is None


def test_results_without_later_fields_are_taken_over(problem_set, fake_solver, tmp_path, checker):
    options = RunOptions(out=tmp_path / "out")
    first = run(problem_set, fake_solver, Settings(), options, checker)
    lines = [
        {key: value for key, value in line.items() if key not in ("kv", "num_correct")}
        for line in lines_of(tmp_path / "out")
    ]
    results = tmp_path / "out" / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = run(problem_set, fake_solver, Settings(), options, checker)
    assert len(fake_solver.asked) == 5
    assert again["accuracy"] == first["accuracy"]
    assert again["pass_at"]["1"] is None


def test_finished_runs_are_found_and_not_changed(problem_set, fake_solver, tmp_path, checker):
    for name in ("b", "a"):
        options = RunOptions(out=tmp_path / "out" / name)
        run(problem_set, fake_solver, Settings(), options, checker)
    results = tmp_path / "out" / "a" / "results.jsonl"
    results.write_bytes(results.read_bytes()[:-1])
    found = find_runs(tmp_path / "out")
    assert [(each.folder.name, len(each.records)) for each in found] == [("a", 4), ("b", 5)]
    assert found[0].dataset == problem_set.name
    assert found[0].settings == Settings().model_dump(mode="json")
    assert not results.read_bytes().endswith(b"\n")
    with pytest.raises(InputError, match="holds no results"):
        find_runs(tmp_path / "nowhere")


KILLED_SCRIPT = """
import json, sys, time
from pathlib import Path
from beamwright.config import Settings
from beamwright.declare import verifier
from beamwright.evaluate import RunOptions, load_problems, run

class Solution:
    def to_json(self):
        return json.loads(Path("solution.json").read_text())

def solve_many(problems, *, in_flight):
    for unique_id, _ in problems:
        time.sleep(0.02)
        yield unique_id, Solution()

def show(record, done, total):
    print(done, flush=True)

options = RunOptions(out=Path("out"), in_flight=2, on_record=show)
print(run(load_problems("set.jsonl"), solve_many, Settings(), options)["problems"])
"""


def test_killed_at_any_moment_every_problem_is_there_exactly_once(
    tmp_path, write_jsonl, make_solution
):
    write_jsonl(*({"problem": "the same", "answer": "1"} for _ in range(30)))
    (tmp_path / "solution.json").write_text(json.dumps(make_solution(["1"] * 50).to_json()))
    source = Path(beamwright.errors.__file__).parents[1]
    command = [sys.executable, "-c", KILLED_SCRIPT]
    started = dict(cwd=tmp_path, text=True, env={**os.environ, "PYTHONPATH": str(source)})
    finished = 0
    for progress in (4, 7):
        with subprocess.Popen(command, stdout=subprocess.PIPE, **started) as process:
            for line in process.stdout:
                if int(line) == finished + progress:
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.read()
        assert process.returncode == -signal.SIGKILL
        whole = (tmp_path / "out" / "results.jsonl").read_bytes().count(b"\n")
        assert whole >= finished + progress
        finished = whole
    assert finished < 30
    # What a kill inside write() would leave.
    with (tmp_path / "out" / "results.jsonl").open("ab") as results:
        results.write(b'{"unique_id": "29", "ind')
    done = subprocess.run(command, capture_output=True, check=True, **started)
    assert done.stdout.split()[-1] == "30"
    ids = [line["unique_id"] for line in lines_of(tmp_path / "out")]
    assert sorted(ids, key=int) == [str(i) for i in range(30)]


def test_a_run_goes_on_with_the_code_that_it_began_with(
    problem_set, fake_solver, tmp_path, checker
):
    options = RunOptions(out=tmp_path / "out")
    settings = Settings.build(verifier="scored")
    for scored, words in (
        (lambda problem, steps: 1, None),
        (lambda problem, steps: 1, None),
        (lambda problem, steps: 2, "code.verifier_code was"),
    ):
        with restored():
            verifier("scored", meaning="x")(scored)
            if words is None:
                run(problem_set, fake_solver, settings, options, checker)
                continue
            with pytest.raises(InputError, match=words):
                run(problem_set, fake_solver, settings, options, checker)
    assert len(lines_of(tmp_path / "out")) == 5
