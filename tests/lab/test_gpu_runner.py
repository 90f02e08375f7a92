"""The runner of `gpu/check.py`: budgets, resuming, crashes and hangs, with real tiny processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beamwright_lab.gpu.runner import (
    CRASHED,
    FAILED,
    KILLED,
    OK,
    TIMED_OUT,
    Journal,
    Plan,
    Stage,
    run_stages,
)
from processes import is_alive

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, signal, subprocess, sys, time
mode, name, runs, journal, _, seconds = sys.argv[1:]
with open(runs, "a") as stream:
    stream.write(mode + "\\n")
def save(**data):
    with open(journal, "a") as stream:
        for part, value in data.items():
            line = {"stage": name, "part": part, "value": value}
            stream.write(json.dumps(line) + "\\n")
if mode == "hang":
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    save(rows=[1], child=child.pid, own=os.getpid())
    time.sleep(600)
save(rows=[1, 2], seconds=float(seconds), not_run=[])
if mode == "partial":
    save(found="something", not_run=["two"])
if mode == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if mode == "fail":
    print("first line")
    print("the last line says why")
    sys.exit(3)
"""
KEY = {"machine": "tiny-card", "smoke": True}


class Bench:
    """Fake stages in a folder, and how often each of them has run."""

    def __init__(self, folder):
        self.journal, self.runs = Journal(folder / "results.jsonl"), folder / "runs"
        self.script, self.log = folder / "stage.py", folder / "log.txt"
        self.script.write_text(SCRIPT)
        self.lines = []

    def stage(self, name, mode="ok", budget_s=10.0, **options):
        files = (str(self.runs), str(self.journal.file))
        command = (sys.executable, "-I", "-S", str(self.script), mode, name, *files)
        return Stage(name, command, budget_s, **{"least_s": 0.1, **options})

    def run(self, *stages, **plan):
        chosen = {"journal": self.journal, "log": self.log, "key": KEY, "budget_s": 600.0}
        return run_stages(stages, Plan(**{**chosen, "grace_s": 0.5, **plan}), self.lines.append)

    @property
    def num_runs(self):
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def wait_until(true):
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()


def test_other_settings_or_again_run_it_again_and_other_sources_do_not(bench):
    bench.run(bench.stage("one"), facts={"sources": "a"})
    bench.run(bench.stage("one"), facts={"sources": "b"})
    assert bench.num_runs == 1
    bench.run(bench.stage("one"), key={**KEY, "smoke": False})
    assert bench.num_runs == 2
    found = bench.run(bench.stage("one"), again=frozenset({"one"}), facts={"sources": "b"})
    assert (bench.num_runs, found["one"]["sources"]) == (3, "b")


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
    wait_until(lambda: not is_alive(found["hang"]["data"]["child"]))


@pytest.mark.skipif(sys.platform != "linux", reason="no signal when a parent dies")
def test_a_killed_check_leaves_its_rows_and_no_stage_on_the_card(bench, tmp_path):
    """What a caller does at its limit."""
    bench.stage("hang", "hang")
    check = f"""
import sys
sys.path.insert(0, {str(ROOT / "lab")!r})
from pathlib import Path
from beamwright_lab.gpu.runner import Journal, Plan, Stage, run_stages
stage = Stage("hang", {bench.stage("hang", "hang").command!r}, 10.0)
journal = Journal(Path({str(bench.journal.file)!r}))
run_stages([stage], Plan(journal, Path({str(bench.log)!r}), {KEY!r}), print)
"""
    process = subprocess.Popen([sys.executable, "-S", "-c", check], stdout=subprocess.DEVNULL)
    wait_until(lambda: "own" in bench.journal.results().get("hang", {}).get("data", {}))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed = bench.journal.results()["hang"]
    assert (killed["status"], killed["data"]["rows"]) == (KILLED, [1])
    wait_until(lambda: not is_alive(killed["data"]["own"]))
    os.kill(killed["data"]["child"], signal.SIGKILL)
    assert bench.run(bench.stage("hang"))["hang"]["status"] == OK, "and it is run again"


def test_a_stage_runs_again_when_what_it_reads_has(bench):
    stages = [bench.stage("one"), bench.stage("reader", reads=("one",))]
    bench.run(*stages)
    bench.run(*stages)
    assert bench.num_runs == 2
    bench.run(*stages, again=frozenset({"one"}))
    assert bench.num_runs == 4


# --- the file --------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_no_line_and_harms_no_other(tmp_path):
    journal = Journal(tmp_path / "results.jsonl")
    journal.begin("one", {"key": KEY}, goes_on=False)
    with journal.file.open("a") as stream:
        stream.write('{"stage": "one", "part": "rows", "row": 0, "va')
    journal.part("one", "rows", 7, 0)
    journal.end("one", {"status": OK})
    assert journal.results()["one"]["data"] == {"rows": [7]}
    assert journal.results()["one"]["status"] == OK
