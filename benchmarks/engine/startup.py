"""Seconds from the start of a process: help, doctor, the demo's first round and its end.

Each command in a process of its own, from the sources of the checkouts that are named, in turns,
with OMP_NUM_THREADS unset and set; beside them the imports of PyTorch and transformers alone,
which nothing that computes can be faster than, and nothing that asks transformers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.common import Timing, finish, interleave, say, table
from benchmarks.engine.loaded import of_checkout

_ROOT = Path(__file__).resolve().parents[2]
_COLUMNS = ("command", "checkout", "OMP_NUM_THREADS", "min s", "median s")
_DEMO = ("solve", "--n", "16", "--width", "4", "--seed", "0", "--progress", "--problem-file")
_ROUND, _END = "demo: first round", "demo: end"
_COMMANDS = {
    "--version": ("--version",),
    "--help": ("--help",),
    "solve --help": ("solve", "--help"),
    "simulate --help": ("simulate", "--help"),
    "plan": ("plan", "--model", "opt-1.3b", "--gpu", "rtx-4090", "--memory", "7GiB"),
    "doctor": ("doctor",),
}


def whole(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run a command to its end."""
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)


def first_line(command: list[str], environment: dict[str, str], folder: Path, begins: str) -> float:
    """Seconds until a line on standard error begins so; the command is run to its end."""
    start, found = time.perf_counter(), None
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found is None and line.decode().startswith(begins):
                found = time.perf_counter() - start
    if process.returncode or found is None:
        raise RuntimeError(f"{command}: exit code {process.returncode}, no line {begins!r}")
    return found


class Demo:
    """The demo's search from a checkout: seconds to its first round, which are kept, and whole."""

    def __init__(self, checkout: Path, problem: Path, omp: str | None) -> None:
        self._run = (*of_checkout(checkout, [*_DEMO, str(problem)], omp), checkout)
        self.firsts: list[float] = []

    def __call__(self) -> float:
        start = time.perf_counter()
        self.firsts.append(first_line(*self._run, "round 1 "))
        return time.perf_counter() - start


def measure(
    checkouts: list[Path], problem: Path, omp: str | None, rounds: int, names: list[str]
) -> dict[tuple[str, str], Timing]:
    """Seconds by command and checkout."""
    found: dict[tuple[str, str], Timing] = {}
    for name in names:
        words = _COMMANDS[name]
        runs = {str(c): partial(whole, *of_checkout(c, words, omp), c) for c in checkouts}
        for checkout, timing in interleave(runs, rounds).items():
            found[name, checkout] = timing
    demos = {str(each): Demo(each, problem, omp) for each in checkouts}
    for checkout, timing in interleave(demos, rounds).items():
        found[_ROUND, checkout] = Timing(tuple(demos[checkout].firsts))
        found[_END, checkout] = timing
    environment = of_checkout(checkouts[0], [], omp)[1]
    for module in ("torch", "transformers"):
        run = partial(whole, [sys.executable, "-c", f"import {module}"], environment, checkouts[0])
        found[f"import {module}", ""] = interleave({module: run}, rounds)[module]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_ROOT], help="default: this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--omp", nargs="+", default=["unset", "1"], help="OMP_NUM_THREADS")
    parser.add_argument("--commands", nargs="*", choices=list(_COMMANDS), default=list(_COMMANDS))
    parser.add_argument("--problem-file", type=Path, default=_ROOT / "demo.txt")
    args = parser.parse_args()
    checkouts, problem = [each.resolve() for each in args.checkouts], args.problem_file.resolve()
    say("once each, not counted: bytecode is written, files are read")
    measure(checkouts, problem, None, 1, args.commands)
    rows = []
    for omp in args.omp:
        found = measure(
            checkouts, problem, None if omp == "unset" else omp, args.rounds, args.commands
        )
        for (name, checkout), timing in found.items():
            rows.append(
                {
                    "command": name,
                    "checkout": checkout,
                    "OMP_NUM_THREADS": omp,
                    "min s": f"{timing.min_s:.2f}",
                    "median s": f"{timing.median_s:.2f}",
                    "rounds s": [round(each, 3) for each in timing.rounds_s],
                }
            )
    print(table(rows, _COLUMNS))
    finish("startup", {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
