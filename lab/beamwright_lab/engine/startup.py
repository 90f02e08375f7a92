"""Seconds from the start of a process: help, doctor, the demo's first round and its end.

Each command in a process of its own, from the sources of the checkouts that are named, in turns,
with OMP_NUM_THREADS unset and set; beside them the imports of PyTorch and transformers alone,
which nothing that computes can be faster than, and nothing that asks transformers.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beamwright.cli.demo import PROBLEM
from beamwright_lab.common import Timing, finish, interleave, say, table

_ROOT = Path(__file__).resolve().parents[3]
_COLUMNS = ("command", "checkout", "OMP_NUM_THREADS", "min s", "median s", "CPU min s")
_DEMO = ("solve", "--n", "16", "--width", "4", "--seed", "0", "--progress", PROBLEM)
_DEMO_NAME = "demo"
_COMMANDS = {
    "version": ("--version",),
    "help": ("--help",),
    "solve help": ("solve", "--help"),
    "simulate help": ("simulate", "--help"),
    "plan": ("plan", "--model", "llama-3.2-1b", "--gpu", "rtx-4090", "--memory", "7GiB"),
    "doctor": ("doctor",),
}


class Started:
    """A command, run to its end at every call.

    cpu_s: CPU seconds of each call, which other processes disturb less. firsts_s: seconds until
    a line on standard error begins with `begins`, if that is given.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: Path, begins: str = ""
    ) -> None:
        self._command, self._begins = command, begins
        self._open = partial(subprocess.Popen, command, env=environment, cwd=folder)
        self.firsts_s: list[float] = []
        self.cpu_s: list[float] = []

    def __call__(self) -> float:
        """Seconds."""
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        num_firsts = len(self.firsts_s)
        with self._open(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if len(self.firsts_s) == num_firsts and line.decode().startswith(self._begins):
                    self.firsts_s.append(time.perf_counter() - start)
        took = time.perf_counter() - start
        if process.returncode or (self._begins and len(self.firsts_s) == num_firsts):
            raise RuntimeError(f"{self._command}: exit code {process.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return took


def of_checkout(
    checkout: Path, words: Sequence[str], omp_threads: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """`beamwright` with these words from a checkout's sources: the command and its environment.

    omp_threads: OMP_NUM_THREADS, which would decide what a checkout decides for itself.
    """
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join(str(checkout / name) for name in ("src", "lab"))
    if omp_threads is not None:
        environment["OMP_NUM_THREADS"] = omp_threads
    return [sys.executable, "-m", "beamwright", *words], environment


def measure(
    checkouts: list[Path], omp: str | None, rounds: int, names: list[str]
) -> list[dict[str, Any]]:
    """Rows of the table."""
    rows = []
    for name in [*names, _DEMO_NAME]:
        words = _COMMANDS.get(name, _DEMO)
        begins = "round 1 " if name == _DEMO_NAME else ""
        runs = {str(c): Started(*of_checkout(c, words, omp), c, begins) for c in checkouts}
        for checkout, timing in interleave(runs, rounds).items():
            run = runs[checkout]
            if begins:
                first = Timing(tuple(run.firsts_s))
                rows.append(row(f"{name}: first round", checkout, omp, first, None))
            rows.append(row(name, checkout, omp, timing, run.cpu_s))
    environment = of_checkout(checkouts[0], [], omp)[1]
    for module in ("torch", "transformers"):
        run = Started([sys.executable, "-c", f"import {module}"], environment, checkouts[0])
        timing = interleave({module: run}, rounds)[module]
        rows.append(row(f"import {module}", "", omp, timing, run.cpu_s))
    return rows


def row(
    name: str, checkout: str, omp: str | None, wall: Timing, cpu_s: list[float] | None
) -> dict[str, Any]:
    return {
        "command": name,
        "checkout": checkout,
        "OMP_NUM_THREADS": omp or "unset",
        "min s": f"{wall.min_s:.2f}",
        "median s": f"{wall.median_s:.2f}",
        "CPU min s": None if cpu_s is None else f"{min(cpu_s):.2f}",
        "rounds s": [round(each, 3) for each in wall.rounds_s],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_ROOT], help="default: this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--omp", nargs="+", default=["unset", "1"], help="OMP_NUM_THREADS")
    parser.add_argument("--commands", nargs="*", choices=list(_COMMANDS), default=list(_COMMANDS))
    args = parser.parse_args()
    checkouts = [each.resolve() for each in args.checkouts]
    say("once each, not counted: bytecode is written, files are read")
    measure(checkouts, None, 1, args.commands)
    rows = []
    for omp in args.omp:
        threads = None if omp == "unset" else omp
        rows += measure(checkouts, threads, args.rounds, args.commands)
    print(table(rows, _COLUMNS))
    finish("startup", {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
