"""The check as on a borrowed machine: budgets, resuming, crashes, killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beamwright_lab.gpu import runner

ROOT = Path(__file__).parents[2]
KEY = {"machine": "tiny-card", "smoke": True}


class Bench:
    """Fake stages in a folder, and how often each of them has run."""

    def __init__(self, folder):
        self.journal, self.runs = runner.Journal(folder / "results.jsonl"), folder / "runs"
        self.log = folder / "log.txt"

    def stage(self, name, mode="ok", **options):
        script = Path(__file__).with_name("tools") / "stage"
        command = (str(script), mode, name, str(self.runs), str(self.journal.file))
        return runner.Stage(name, command, 10.0, least_s=0.1, **options)

    def run(self, *stages, **plan):
        chosen = {"journal": self.journal, "log": self.log, "key": KEY, "budget_s": 600.0}
        return runner.run_stages(
            stages, runner.Plan(**{**chosen, "grace_s": 0.5, **plan}), lambda line: None
        )

    @property
    def num_runs(self):
        return len(self.runs.read_text().splitlines())


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


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
    [
        ("crash", runner.CRASHED, "signal 11"),
        ("fail", runner.FAILED, "exit code 3: the last line says why"),
    ],
)
def test_a_crash_or_failure_keeps_what_was_found_and_the_rest_goes_on(bench, mode, status, says):
    found = bench.run(bench.stage("bad", mode), bench.stage("good"))
    assert (found["bad"]["status"], found["bad"]["error"]) == (status, says)
    assert found["bad"]["data"]["rows"] == [1, 2]
    assert found["good"]["status"] == runner.OK
    bench.run(bench.stage("bad", mode), bench.stage("good"))
    assert bench.num_runs == 3, "a failed stage is tried again, a good one kept"


def test_a_stage_runs_again_when_what_it_reads_has(bench):
    stages = [bench.stage("one"), bench.stage("reader", reads=("one",))]
    bench.run(*stages)
    bench.run(*stages)
    assert bench.num_runs == 2
    bench.run(*stages, again=frozenset({"one"}))
    assert bench.num_runs == 4


def test_a_line_that_was_cut_off_is_no_line_and_harms_no_other(tmp_path):
    journal = runner.Journal(tmp_path / "results.jsonl")
    journal.begin("one", {"key": KEY}, goes_on=False)
    with journal.file.open("a") as stream:
        stream.write('{"stage": "one", "part": "rows", "row": 0, "va')
    journal.part("one", "rows", 7, 0)
    journal.end("one", {"status": runner.OK})
    assert journal.results()["one"]["data"] == {"rows": [7]}
    assert journal.results()["one"]["status"] == runner.OK


# --- the whole check, with stages of its own -----------------------------------------------------

CHECK = """
import os, sys, time, types
from dataclasses import replace
from beamwright_lab.gpu import check

FILE = {file!r}
def rows(context):
    data = {{"rows": [*context.earlier.get("rows", [])], "pid": os.getpid()}}
    context.save(data)
    while len(data["rows"]) < 8:
        time.sleep(0.04)
        with open({ran!r}, "a") as stream:
            stream.write(context.stage + "\\n")
        data["rows"].append(len(data["rows"]))
        context.save(data)
    return data
def fails(context):
    context.save({{"rows": [1], "pid": os.getpid()}})
    raise RuntimeError("on purpose")
def hangs(context):
    context.save({{"rows": [1], "pid": os.getpid()}})
    time.sleep(600)
sys.modules["beamwright_lab.gpu.fake"] = types.SimpleNamespace(rows=rows, fails=fails, hangs=hangs)
check.STAGES = (
    ("graphs", 3, 0.1, "fake.rows"), ("roofline", 2, 0.1, "fake.fails"),
    ("link", 3, 0.1, "fake.rows"), ("search", 2, 0.1, "fake.hangs"),
)
check._READS, check.report = {{}}, lambda arguments: ""
own = check.stages
check.stages = lambda arguments: [
    replace(each, command=(each.command[0], FILE, *each.command[3:])) for each in own(arguments)
]
sys.exit(check.main())
"""


def is_alive(pid):
    """False of a process that is gone, or waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="no signal when a parent dies")
def test_a_check_that_is_killed_at_random_moments_loses_nothing_and_leaves_nobody(tmp_path):
    script, ran, out = tmp_path / "check.py", tmp_path / "ran", tmp_path / "out"
    script.write_text(CHECK.format(file=str(script), ran=str(ran)))
    command = [sys.executable, str(script), "--device", "cpu", "--smoke", "--out", str(out)]
    journal, moments, kills = runner.Journal(out / "results.jsonl"), random.Random(0), 4
    found = {}
    for _ in range(kills):
        process = subprocess.Popen([*command, "--budget", "60"], stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.2, 1.5))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before, found = found, {n: r["data"].get("rows", []) for n, r in journal.results().items()}
        assert all(found[name][: len(rows)] == rows for name, rows in before.items())
    start = time.monotonic()
    # What a caller's limit leaves: the check ends before it, whatever hangs.
    subprocess.run([*command, "--budget", "4"], capture_output=True, timeout=30, check=False)
    assert time.monotonic() - start < 20
    results = journal.results()
    status = {name: result["status"] for name, result in results.items()}
    assert status.pop("environment") in (runner.OK, runner.KILLED)
    assert status == {
        "graphs": runner.OK,
        "roofline": runner.FAILED,
        "link": runner.OK,
        "search": runner.TIMED_OUT,
    }
    assert results["roofline"]["error"] == "RuntimeError: on purpose"
    for name in ("graphs", "link"):
        assert results[name]["data"]["rows"] == [*range(8)]
    assert len(ran.read_text().split()) <= 16 + kills, "at most the row of that moment again"
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    pids = {line["value"] for line in lines if line.get("part") == "pid"}
    assert len(pids) >= 4
    assert not any(map(is_alive, pids))


NOT_THERE = ("fastapi", "math_verify", "matplotlib", "prometheus_client", "ray", "uvicorn")
"""What docs/develop/gpu-check.md does not say to bring."""


@pytest.mark.nightly
def test_it_runs_without_what_nobody_is_told_to_bring(tmp_path):
    out = tmp_path / "out"
    for name in NOT_THERE:
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)")
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT / "lab")))
    command = [sys.executable, "-m", "beamwright_lab.gpu.check", "--smoke", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--only", "graphs", "--out", str(out)],
        env={"PYTHONPATH": path, "HOME": str(tmp_path)}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (out / "log.txt").read_text()
    assert "| graphs | ok |" in done.stdout
    assert (out / "summary.md").read_text() == done.stdout
    found = runner.Journal(out / "results.jsonl").results()
    assert found["graphs"]["data"]["rows"][0]["equal"] is True
    assert found["environment"]["versions"]["torch"]
