"""The runner of `gpu/check.py`: budgets, resuming, crashes and hangs, with real tiny processes."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.report import render, write_report
from benchmarks.gpu.runner import (
    CRASHED,
    FAILED,
    NO_TIME,
    OK,
    TIMED_OUT,
    Plan,
    Stage,
    read_result,
    run_stages,
)

SCRIPT = """
import json, os, signal, subprocess, sys, time
mode, runs, seconds, into = sys.argv[1], sys.argv[2], float(sys.argv[4]), sys.argv[6]
with open(runs, "a") as stream:
    stream.write(mode + "\\n")
def save(**data):
    with open(into + ".tmp", "w") as stream:
        json.dump(data, stream)
    os.replace(into + ".tmp", into)
if mode == "hang":
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    save(rows=[1], child=child.pid)
    time.sleep(600)
save(rows=[1, 2], seconds=seconds, earlier=sys.argv[7:])
if mode == "partial":
    save(rows=[1], not_run=["two"], earlier=sys.argv[7:])
if mode == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if mode == "fail":
    print("first line")
    print("the last line says why")
    sys.exit(3)
"""
KEY = {"sources": "a", "commit": "c", "machine": {"short": "tiny-card"}, "smoke": True}


class Bench:
    """Fake stages in a folder, and how often each of them has run."""

    def __init__(self, folder):
        self.folder, self.runs = folder / "results", folder / "runs"
        self.script = folder / "stage.py"
        self.script.write_text(SCRIPT)
        self.lines = []

    def stage(self, name, mode="ok", budget_s=10.0, **options):
        command = (sys.executable, "-I", "-S", str(self.script), mode, str(self.runs))
        return Stage(name, command, budget_s, **{"least_s": 0.1, **options})

    def run(self, *stages, **plan):
        chosen = {"folder": self.folder, "key": KEY, "budget_s": 600.0, "grace_s": 0.5, **plan}
        return run_stages(stages, Plan(**chosen), self.lines.append)

    @property
    def num_runs(self):
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_finished_stage_is_not_run_again(bench):
    first = bench.run(bench.stage("one"), bench.stage("two"))
    assert [result["status"] for result in first.values()] == [OK, OK]
    assert first["one"]["data"]["rows"] == [1, 2]
    assert bench.run(bench.stage("one"), bench.stage("two")) == first
    assert bench.num_runs == 2


def test_other_sources_settings_or_again_run_it_again(bench):
    bench.run(bench.stage("one"))
    bench.run(bench.stage("one"), key={**KEY, "sources": "b"})
    assert bench.num_runs == 2
    bench.run(bench.stage("one"), key={**KEY, "sources": "b"}, again=frozenset({"one"}))
    assert bench.num_runs == 3


def test_only_the_named_stages_are_run(bench):
    found = bench.run(bench.stage("one"), bench.stage("two"), only=frozenset({"two"}))
    assert list(found) == ["two"]
    assert read_result(bench.folder, "one") is None


@pytest.mark.parametrize(
    ("mode", "status", "says"),
    [("crash", CRASHED, "signal 11"), ("fail", FAILED, "exit code 3: the last line says why")],
)
def test_a_crash_or_failure_keeps_what_was_found_and_the_rest_goes_on(bench, mode, status, says):
    found = bench.run(bench.stage("bad", mode), bench.stage("good"))
    assert found["bad"]["status"] == status
    assert found["bad"]["error"] == says
    assert found["bad"]["data"]["rows"] == [1, 2]
    assert found["good"]["status"] == OK
    bench.run(bench.stage("bad", mode), bench.stage("good"))
    assert bench.num_runs == 3, "a failed stage is tried again, a good one kept"


def test_a_hanging_stage_is_stopped_with_its_children_and_the_rest_goes_on(bench):
    hang = bench.stage("hang", "hang", budget_s=3.0)
    found = bench.run(hang, bench.stage("good", budget_s=597.0))
    assert found["hang"]["status"] == TIMED_OUT
    assert found["hang"]["data"]["rows"] == [1]
    assert found["good"]["status"] == OK
    child, end = found["hang"]["data"]["child"], time.monotonic() + 60
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(child)


def test_what_does_not_fit_is_not_started(bench):
    found = bench.run(bench.stage("one", least_s=50.0), bench.stage("two"), budget_s=40.0)
    assert [result["status"] for result in found.values()] == [NO_TIME, OK]
    assert read_result(bench.folder, "one") is None
    assert "one: no time left (40 s)" in bench.lines


def test_a_command_that_does_not_exist_is_a_failed_stage(bench):
    missing = Stage("missing", ("/no/such/program",), 10.0)
    found = bench.run(missing, bench.stage("good"))
    assert found["missing"]["status"] == FAILED
    assert "/no/such/program" in found["missing"]["error"]
    assert found["good"]["status"] == OK


def test_time_is_shared_by_budget_and_a_stage_is_told_its_share(bench):
    stages = [bench.stage("one", budget_s=30.0), bench.stage("two", budget_s=10.0)]
    found = bench.run(*stages, budget_s=400.0)
    assert 290 < found["one"]["data"]["seconds"] <= 300
    # What the first has left over is the second's.
    assert found["two"]["data"]["seconds"] > 300


def test_kept_stages_take_no_share(bench):
    stages = [bench.stage("one", budget_s=30.0), bench.stage("two", budget_s=10.0)]
    bench.run(*stages, only=frozenset({"two"}))
    found = bench.run(*stages, budget_s=400.0)
    assert found["one"]["data"]["seconds"] > 390


def test_a_stage_that_would_get_too_little_is_given_its_least(bench):
    found = bench.run(
        bench.stage("one", least_s=50.0), bench.stage("two", budget_s=90.0), budget_s=60.0
    )
    assert found["one"]["data"]["seconds"] == 50.0


def test_a_stage_runs_again_when_what_it_reads_has(bench):
    stages = [bench.stage("one"), bench.stage("reader", reads=("one",))]
    bench.run(*stages)
    bench.run(*stages)
    assert bench.num_runs == 2
    bench.run(*stages, again=frozenset({"one"}))
    assert bench.num_runs == 4


def test_a_stage_that_has_left_something_out_goes_on_from_there(bench):
    first = bench.run(bench.stage("one", "partial"))
    assert first["one"]["data"]["earlier"] == []
    file = str(bench.folder / "one.json")
    again = bench.run(bench.stage("one"))
    assert again["one"]["data"]["earlier"] == ["--earlier", file]
    bench.run(bench.stage("one", "partial"), again=frozenset({"one"}))
    other = bench.run(bench.stage("one"), key={**KEY, "sources": "b"})
    assert other["one"]["data"]["earlier"] == [], "what other sources have found does not count"


def test_a_broken_result_file_is_no_result(bench):
    bench.run(bench.stage("one"))
    (bench.folder / "one.json").write_text('{"stage": "one", "sta')
    bench.run(bench.stage("one"))
    assert bench.num_runs == 2
    assert json.loads((bench.folder / "one.json").read_text())["status"] == OK


# --- the report of a partial run -------------------------------------------------------------


def test_the_report_of_a_partial_run_names_what_is_missing(bench, tmp_path):
    bench.run(bench.stage("link"), bench.stage("parity", "crash"))
    text, file = write_report(bench.folder, ["link", "parity", "roofline"])
    assert file == tmp_path / "gpu_check_tiny-card_smoke.json"
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert "| ok |" in lines["| link"]
    assert "crashed" in lines["| parity"]
    assert "not run" in lines["| roofline"]
    assert "SMOKE RUN" in text
    written = json.loads(file.read_text())["stages"]
    assert written["roofline"] == {"stage": "roofline", "status": "not run", "data": {}}


def test_without_any_result_there_is_no_file(tmp_path):
    text, file = write_report(tmp_path, ["link"])
    assert file is None
    assert "nothing has run" in text


def test_an_emulated_link_is_labelled():
    key = {**KEY, "link_bandwidth": 12_000_000_000}
    assert "EMULATED at 12 GB/s" in render({"link": {"status": OK, "key": key, "data": {}}})
