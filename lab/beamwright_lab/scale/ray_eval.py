"""`eval --ray` on a local cluster of two nodes of one core: trees, deaths, overhead.

`same`: trees of problems of `bundled:test` against one process. `kills`: in the middle of a run a
replica's process, the raylet of the second node, and the driver are killed (SIGKILL); every problem
has to be there once, with the same tree; the driver's run is repeated to go on. `speed`: seconds
after start-up of one process, and of one and two replicas of one core each, in turns.

    python -m beamwright_lab.scale.ray_eval --problems 60 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from beamwright import Settings, Solver
from beamwright.evaluate import load_problems
from beamwright_lab.common import finish, say

OPTIONS = {"n": 16, "width": 4}
SEARCH = ["--n", "16", "--width", "4"]


@contextmanager
def cluster() -> Iterator[str]:
    """A head with one core, and a node with one beside it; its address."""
    ray = str(Path(sys.executable).with_name("ray"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    start = [ray, "start", "--num-cpus=1", "--disable-usage-stats"]
    head = ["--head", "--port=6399", "--include-dashboard=false"]
    subprocess.run([*start, *head], check=True, **quiet)  # type: ignore[call-overload]
    try:
        address = ["--address=127.0.0.1:6399"]
        subprocess.run([*start, *address], check=True, **quiet)  # type: ignore[call-overload]
        yield "127.0.0.1:6399"
    finally:
        subprocess.run([ray, "stop", "--force"], check=False, **quiet)  # type: ignore[call-overload]


def processes(word: str) -> list[int]:
    """Of those whose command line has this word, the newest last."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if word in line and "ray_eval" not in line:
                found.append(int(folder.name))
    return sorted(found)


def command(out: Path, num: int, *words: str) -> list[str]:
    """An evaluation."""
    run = [sys.executable, "-m", "beamwright", "eval", "bundled:test", "--limit", str(num)]
    return [*run, *SEARCH, "--out", str(out), "--json", *words]


def trees(out: Path) -> tuple[dict[str, str], int]:
    """Hashes by problem, and the number of records."""
    lines = (out / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {each["unique_id"]: each["tree_hash"] for each in records}, len(records)


def half_done(out: Path, num: int) -> None:
    """Wait until a third of the problems are on disk."""
    file = out / "results.jsonl"
    end = time.monotonic() + 300
    while not (file.exists() and len(file.read_text().splitlines()) >= num // 3):
        if time.monotonic() > end:
            raise TimeoutError("the run does not get on")
        time.sleep(0.05)


def killed(out: Path, num: int, address: str, victim: Callable[[int], int]) -> str:
    """A run in whose middle a process is killed. victim: its id, given the driver's."""
    words = command(out, num, "--ray", address, "--replicas", "2", "--in-flight", "4")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as driver:
        half_done(out, num)
        chosen = victim(driver.pid)
        os.kill(chosen, signal.SIGKILL)
        driver.communicate(timeout=600)
    if chosen == driver.pid:
        again = subprocess.run(words, capture_output=True, check=False, timeout=600)
        return f"killed, then exit code {again.returncode}"
    return f"exit code {driver.returncode}"


def deaths(folder: Path, num: int, expected: dict[str, str]) -> list[dict[str, Any]]:
    """Every kind of death, on a cluster of its own."""
    victims: dict[str, Callable[[int], int]] = {
        "a replica": lambda _driver: processes("ray::Replica")[-1],
        "a node's raylet": lambda _driver: processes("raylet/raylet")[-1],
        "the driver": lambda driver: driver,
    }
    found = []
    for name, victim in victims.items():
        out = folder / name.replace(" ", "-")
        with cluster() as address:
            ended = killed(out, num, address, victim)
        hashes, records = trees(out)
        found.append(
            {
                "killed": name,
                "ended": ended,
                "records": records,
                "problems": len(hashes),
                "equal trees": sum(expected[key] == each for key, each in hashes.items()),
            }
        )
        say(*found[-1].values())
    return found


def speeds(num: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from the first problem to the last, models loaded; one thread each."""
    import ray

    from beamwright.cluster.cluster import Cluster
    from beamwright.cluster.ray_solving import RaySolving

    problems = [
        (each.unique_id, each.problem) for each in load_problems("bundled:test", num).problems
    ]
    settings, found = Settings.build(model="bundled", **OPTIONS), {}
    ray.init(num_cpus=3, include_dashboard=False, configure_logging=False, log_to_driver=False)
    with (
        Solver(settings) as solver,
        RaySolving(settings, Cluster(None, replicas=1)) as one,
        RaySolving(settings, Cluster(None, replicas=2)) as two,
    ):
        sides: dict[str, Callable[[], Any]] = {
            "one process": lambda: list(solver.solve_many(problems, in_flight="auto")),  # type: ignore[call-overload]
            "one replica": lambda: list(one(problems, in_flight="auto")),
            "two replicas": lambda: list(two(problems, in_flight="auto")),
        }
        for number in range(rounds + 1):
            for name, side in sides.items():
                began = time.perf_counter()
                side()
                if number:  # the first round loads models
                    found.setdefault(name, []).append(time.perf_counter() - began)
    ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", nargs="+", default=["same", "kills", "speed"])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nodes of this machine alone
    report: dict[str, Any] = {"settings": vars(args)}
    with tempfile.TemporaryDirectory() as name:
        folder, num = Path(name), args.problems
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command(folder / "one", num), check=True, **quiet)  # type: ignore[call-overload]
        expected, _ = trees(folder / "one")
        if "same" in args.what:
            with cluster() as address:
                words = command(folder / "two", num, "--ray", address, "--replicas", "2")
                subprocess.run(words, check=True, **quiet)  # type: ignore[call-overload]
            hashes, records = trees(folder / "two")
            equal = sum(expected[key] == each for key, each in hashes.items())
            report["same"] = {"records": records, "equal trees": equal, "of": num}
            say(report["same"])
        if "kills" in args.what:
            report["kills"] = deaths(folder, num, expected)
    if "speed" in args.what:
        seconds = speeds(args.problems, args.rounds)
        report["speed"] = {
            name: {"least": round(min(each), 2), "median": round(median(each), 2)}
            for name, each in seconds.items()
        }
        say(report["speed"])
    finish("ray_eval", report)


if __name__ == "__main__":
    main()
