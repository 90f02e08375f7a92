"""Scoring beside decoding: the plain executor against the overlapped one, problems in flight.

Pairs of runs over the same problems on the bundled models, each side first in turns. A line per
run: seconds, CPU seconds, seconds that the loop's thread was ready and had no core, tokens, bytes
over the link. Seconds less those without a core are what a quiet machine would take: just that
where the loop's thread does everything, at most that where it waits for a lane that has no core.
The trees of all runs are compared.

    python -m beamwright_lab.engine.overlap --problems 128 --n 8 --pairs 5
    python -m beamwright_lab.engine.overlap --problems 32 --n 16 --kv-share 0.25
"""

from __future__ import annotations

import argparse
import resource
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamwright import Solution, Solver
from beamwright.evaluate import load_problems

EXECUTORS = ("plain", "overlapped")


@dataclass(frozen=True)
class Run:
    """What it took to solve all problems. hashes: of their trees."""

    wall_s: float
    cpu_s: float
    waited_s: float
    both_share: float
    tokens: int
    iterations: int
    moved_bytes: int
    hashes: tuple[str, ...]


def waited_s() -> float:
    """Seconds in which this thread could have run and had no core; 0 where nobody counts them."""
    file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(solver: Solver, problems: Sequence[tuple[str, str]], in_flight: int) -> Run:
    """Solve all problems once."""
    before = solver.usage().engine
    start, used, waited = time.perf_counter(), cpu_s(), waited_s()
    found = dict(solver.solve_many(problems, in_flight=in_flight))
    wall, used, waited = time.perf_counter() - start, cpu_s() - used, waited_s() - waited
    solved = [found[name] for name, _ in problems]
    counts = solver.usage().engine - before
    assert all(isinstance(each, Solution) for each in solved)
    return Run(
        wall,
        used,
        waited,
        sum(each.time.both_s for each in solved) / sum(each.time.total_s for each in solved),
        counts.row_tokens,
        counts.iterations,
        counts.h2d_bytes + counts.d2h_bytes,
        tuple(each.tree_hash for each in solved),
    )


def make_solvers(
    problems: Sequence[tuple[str, str]], n: int, in_flight: int, kv_share: float | None
) -> dict[str, Solver]:
    """One per executor; kv_share: of the KV that they have on the device at most, on two tiers."""
    options: dict[str, Any] = {"model": "bundled", "verifier": "bundled", "n": n, "width": 4}
    if kv_share is not None:
        solver = Solver(**options)
        measure(solver, problems, in_flight)
        peak = sum(model.store.device_peak_bytes for model in solver._tree_models)
        options |= {"schedule": "locality", "kv_memory": int(kv_share * peak)}
    return {name: Solver(**options, executor=name) for name in EXECUTORS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kv-share", type=float)
    args = parser.parse_args()
    found = load_problems("bundled:test", limit=args.problems).problems
    problems = [(each.unique_id, each.problem) for each in found]
    solvers = make_solvers(problems, args.n, args.in_flight, args.kv_share)
    runs: dict[str, list[Run]] = {name: [] for name in EXECUTORS}
    print("executor | seconds | CPU s | without a core, s | both | iterations | tokens | MiB moved")
    for pair in range(args.pairs + 1):
        for name in EXECUTORS[:: 1 if pair % 2 else -1]:
            before = sum(run.moved_bytes for run in runs[name][-1:])
            run = measure(solvers[name], problems, args.in_flight)
            runs[name].append(run)
            print(
                f"{name} | {run.wall_s:.2f} | {run.cpu_s:.2f} | {run.waited_s:.2f} | "
                f"{run.both_share:.2f} | {run.iterations} | {run.tokens:,} | "
                f"{(run.moved_bytes - before) / 2**20:.1f}",
                flush=True,
            )
    assert len({run.hashes for each in runs.values() for run in each}) == 1, "the trees differ"
    print("(min, median) without the first pair | seconds | less those without a core | CPU s")
    for name, each in runs.items():
        kept = each[1:]
        columns = (
            [run.wall_s for run in kept],
            [run.wall_s - run.waited_s for run in kept],
            [run.cpu_s for run in kept],
        )
        print(name, *(f"{min(c):.2f}, {statistics.median(c):.2f}" for c in columns), sep=" | ")
    for solver in solvers.values():
        solver.close()


if __name__ == "__main__":
    main()
