"""Seconds of a search by the number of torch's threads and by how long they spin, idle and busy.

A side is THREADS[:SPINS], the values of OMP_NUM_THREADS and GOMP_SPINCOUNT of a worker process;
without SPINS it has what `beamwright` sets. All workers of a size are loaded at once and take
turns, so the sides are interleaved. Beside them runs a number of busy loops, for a bounded time,
or `twin`: a second worker of the same side that searches at the same time. Seconds of a search
and CPU seconds of its process, least and median, of the slower one of twins.

    python -m beamwright_lab.engine.threads bundled model.gguf --sides 1 2 2:0 2:300000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from beamwright import Solver
from beamwright.cores import num_cores
from beamwright_lab.common import busy_loops, finish, say, table

_TWIN = "twin"
_COLUMNS = ("model", "n", "beside", "side", "min s", "median s", "CPU min s", "CPU median s")


def start(side: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """A process that runs `work`."""
    threads, _, spins = side.partition(":")
    chosen = {"OMP_NUM_THREADS": threads, **({"GOMP_SPINCOUNT": spins} if spins else {})}
    command = [sys.executable, "-m", "beamwright_lab.engine.threads", *arguments, "--worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | chosen, stdin=pipe, stdout=pipe, text=True)


def search_with(workers: Sequence[Any]) -> tuple[float, float]:
    """Have them search at the same time; seconds and CPU seconds of the slowest."""
    for worker in workers:
        print(file=worker.stdin, flush=True)
    wall, cpu = max(json.loads(worker.stdout.readline()) for worker in workers)
    return wall, cpu


def work(model: str, n: int, num_tokens: int) -> None:
    """Search once for each line of standard input, and print the seconds."""
    with Solver(
        model=model, verifier="none", search="majority", n=n, max_tokens=num_tokens,
        ignore_eos=True, kv_memory="1GiB",
    ) as solver:  # fmt: skip
        for _ in sys.stdin:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            solver.synthetic(32)
            took = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            print(json.dumps(took), flush=True)


def measure(args: argparse.Namespace, model: str, n: int) -> list[dict[str, Any]]:
    """Rows of the table, for one model and number of paths."""
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}
    arguments = [model, "--n", str(n), "--tokens", str(args.tokens)]
    with ExitStack() as stack:
        pairs: dict[str, list[Any]] = {side: [] for side in args.sides}
        for side in args.sides * (1 + (_TWIN in args.beside)):
            pairs[side].append(stack.enter_context(start(side, arguments)))
            search_with(pairs[side][-1:])  # loaded, and warm
        for beside in args.beside * args.rounds:
            with busy_loops(0 if beside == _TWIN else int(beside)):
                for side, workers in pairs.items():
                    seconds = search_with(workers if beside == _TWIN else workers[:1])
                    took.setdefault((beside, side), []).append(seconds)
    rows = []
    for (beside, side), several in took.items():
        figures = [
            f"{least(each):.3f}" for each in zip(*several, strict=True) for least in (min, median)
        ]
        rows.append(dict(zip(_COLUMNS, (model, n, beside, side, *figures), strict=True)))
    say(table(rows, _COLUMNS))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", default=["1", "2", "2:0", "2:300000"])
    parser.add_argument("--beside", nargs="+", default=["0", str(num_cores()), _TWIN])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        work(args.models[0], args.n[0], args.tokens)
        return
    finish(
        "threads",
        {"rows": [r for model in args.models for n in args.n for r in measure(args, model, n)]},
    )


if __name__ == "__main__":
    main()
