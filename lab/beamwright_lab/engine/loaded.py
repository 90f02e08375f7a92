"""The demo while other processes keep every core busy, and idle: any number of checkouts in turns.

Whole runs of `beamwright solve` with the bundled models, each in a process of its own, from the
sources of the checkouts that are named: wall seconds, imports and model loading included, and
seconds of the search itself. Every checkout runs once per round, the first one rotating.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from beamwright_lab.common import Timing, finish, interleave, say, table

_ROOT = Path(__file__).resolve().parents[3]
_COLUMNS = ("checkout", "busy per core", "wall s", "median", "search s", "median ")


@contextmanager
def busy_cores(per_core: int) -> Iterator[None]:
    """That many processes per core that never rest, for as long as the block takes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(per_core * (cores or 1))]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def of_checkout(
    checkout: Path, words: Sequence[str], omp_threads: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """`beamwright` with these words from a checkout's sources: the command and its environment.

    omp_threads: OMP_NUM_THREADS, which would decide what a checkout decides for itself.
    """
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(checkout / "src")
    if omp_threads is not None:
        environment["OMP_NUM_THREADS"] = omp_threads
    return [sys.executable, "-m", "beamwright", *words], environment


def solve(checkout: Path, words: list[str]) -> float:
    """Run the search from a checkout; seconds of the search itself."""
    command, environment = of_checkout(checkout, ["solve", *words, "--json"])
    done = subprocess.run(
        command, env=environment, cwd=checkout, check=True, capture_output=True, text=True
    )
    return float(json.loads(done.stdout)["time"]["total_s"])


def measure(
    checkouts: list[Path], words: list[str], rounds: int
) -> dict[str, tuple[Timing, Timing]]:
    """Wall and search seconds of every checkout, in turns."""
    searches: dict[str, list[float]] = {str(each): [] for each in checkouts}

    def side(checkout: Path) -> float:
        start = time.perf_counter()
        searches[str(checkout)].append(solve(checkout, words))
        return time.perf_counter() - start

    sides = {str(each): lambda each=each: side(each) for each in checkouts}
    walls = interleave(sides, rounds)  # type: ignore[arg-type]
    return {name: (wall, Timing(tuple(searches[name]))) for name, wall in walls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_ROOT], help="default: this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="processes per core")
    parser.add_argument("--problem-file", type=Path, default=_ROOT / "demo.txt")
    parser.add_argument("--n", type=int, default=16)
    args = parser.parse_args()
    checkouts = [each.resolve() for each in args.checkouts]
    words = ["--problem-file", str(args.problem_file.resolve()), "--n", str(args.n)]
    words += ["--width", "4", "--seed", "0"]
    rows = []
    for busy in args.busy:
        say(f"{busy} busy processes per core")
        with busy_cores(busy):
            found = measure(checkouts, words, args.rounds)
        for name, (wall, search) in found.items():
            rows.append(
                {
                    "checkout": name,
                    "busy per core": busy,
                    "wall s": " ".join(f"{each:.2f}" for each in wall.rounds_s),
                    "median": f"{wall.median_s:.2f}",
                    "search s": " ".join(f"{each:.2f}" for each in search.rounds_s),
                    "median ": f"{search.median_s:.2f}",
                }
            )
    print(table(rows, _COLUMNS))
    finish("loaded", {"words": words, "rows": rows})


if __name__ == "__main__":
    main()
