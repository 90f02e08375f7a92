"""The check as on a borrowed machine: no network, a folder of wheels, killed at any moment."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from beamwright_lab.gpu.runner import FAILED, KILLED, OK, TIMED_OUT, Journal
from processes import is_alive

ROOT = Path(__file__).parents[2]
SITE = Path(pytest.__file__).parents[1]
BROUGHT = ("pydantic", "pyyaml", "pytest")
"""What docs/develop/gpu-check.md says to bring; the rest of this is there."""
THERE = ("torch", "triton", "transformers")
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


@pytest.mark.skipif(sys.platform != "linux", reason="no signal when a parent dies")
def test_a_check_that_is_killed_at_random_moments_loses_nothing_and_leaves_nobody(tmp_path):
    script, ran, out = tmp_path / "check.py", tmp_path / "ran", tmp_path / "out"
    script.write_text(CHECK.format(file=str(script), ran=str(ran)))
    command = [sys.executable, str(script), "--device", "cpu", "--smoke", "--out", str(out)]
    journal, moments, kills = Journal(out / "results.jsonl"), random.Random(0), 4
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
    assert status.pop("environment") in (OK, KILLED)
    assert status == {"graphs": OK, "roofline": FAILED, "link": OK, "search": TIMED_OUT}
    assert results["roofline"]["error"] == "RuntimeError: on purpose"
    for name in ("graphs", "link"):
        assert results[name]["data"]["rows"] == [*range(8)]
    assert len(ran.read_text().split()) <= 16 + kills, "at most the row of that moment again"
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    pids = {line["value"] for line in lines if line.get("part") == "pid"}
    assert len(pids) >= 4
    assert not any(map(is_alive, pids))


def needed(names):
    """These distributions, and what they need, as far as it is here."""
    found, coming = {}, [*names]
    while coming:
        name = coming.pop()
        if name.lower().replace("_", "-") in found:
            continue
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name.lower().replace("_", "-")] = here
        for each in here.requires or ():
            if "extra ==" not in each:
                coming.append(re.match(r"[\w.-]+", each)[0])
    return found.values()


@pytest.mark.nightly
def test_a_plain_interpreter_and_the_wheels_that_are_named_run_it_without_network(tmp_path):
    wheels, out = tmp_path / "wheelhouse", tmp_path / "out"
    wheels.mkdir()
    for each in needed([*BROUGHT, *THERE]):
        for top in {file.parts[0] for file in each.files or () if ".." not in file.parts}:
            if (SITE / top).exists() and not (wheels / top).exists():
                (wheels / top).symlink_to(SITE / top)
    assert not (wheels / "math_verify").exists()
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "lab", wheels)))
    alone = ["unshare", "-rn"] if _can_be_alone() else []
    command = [*alone, sys.executable, "-S", "-m", "beamwright_lab.gpu.check", "--smoke"]
    command += ["--device", "cpu", "--only", "graphs", "--out", str(out)]
    done = subprocess.run(
        command, env={"PYTHONPATH": path, "HOME": str(tmp_path)}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (out / "log.txt").read_text()
    assert "missing" not in done.stderr
    assert "| graphs | ok |" in done.stdout
    assert (out / "summary.md").read_text() == done.stdout
    found = Journal(out / "results.jsonl").results()
    assert found["graphs"]["data"]["rows"][0]["equal"] is True
    assert found["environment"]["versions"]["torch"]
    files = {file.name for file in out.iterdir()}
    assert files == {"results.jsonl", "summary.md", "log.txt", "triton_cache.tar.gz"}


def _can_be_alone():
    tool = shutil.which("unshare")
    return tool and not subprocess.run([tool, "-rn", "true"], check=False).returncode
