"""Kill a search at random moments and resume it: is the tree the one of an uninterrupted run?

Every attempt is a process of its own that solves one problem with a checkpoint and dies by SIGKILL
at a random moment, from before its first token to the end of the search; if there is no file yet,
there is nothing to resume. Required in float64 (KV is computed again after a kill, and prefill
differs from decoding in the last bits); in float32 the rate of trees that differ is the finding.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from beamwright import Solution, Solver
from beamwright.evaluate import Problem, load_problems
from beamwright.saved.checkpoint import read_checkpoint
from beamwright_lab.common import finish, say, table

_LOADED = "loaded"
_COLUMNS = ["dtype", "kills", "unsaved", "ended", "resumed", "midway", "equal", "tokens"]
_COLUMNS += ["flips_per_million"]


def solver(options: Mapping[str, Any], threads: int) -> Solver:
    torch.set_num_threads(threads)
    return Solver(**options)


def be_killed(order: str) -> None:
    """The process that dies: says when it is ready, then solves when it is told to."""
    todo = json.loads(order)
    with solver(todo["options"], todo["threads"]) as ready:
        print(_LOADED, flush=True)
        sys.stdin.readline()
        ready.solve(todo["problem"], problem_id=todo["id"], checkpoint=Path(todo["file"]))


def kill_one(order: Mapping[str, Any], after_s: float) -> bool:
    """Start a search and kill it after so many seconds; False if it had ended by itself."""
    command = [
        sys.executable,
        "-m",
        "beamwright_lab.checks.resume_kills",
        "--be-killed",
        json.dumps(order),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) != _LOADED.encode():
            if not line and process.poll() is not None:
                raise RuntimeError("the search did not start")
        process.stdin.write(b"\n")
        process.stdin.flush()
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


class Kills:
    """Kills in one precision, of one problem after another."""

    def __init__(self, dtype: str, args: argparse.Namespace) -> None:
        self._options = {
            "model": args.model,
            "verifier": args.verifier,
            "n": args.n,
            "width": args.width,
            "seed": args.seed,
            "kv_memory": args.kv_memory,
            "dtype": dtype,
        }
        self._dtype, self._threads = dtype, args.threads
        self._solver = solver(self._options, args.threads)

    def run(self, problems: Sequence[Problem], num_kills: int, draw: random.Random) -> Any:
        """Kill and resume so many searches; kills that came before anything was saved are extra."""
        whole: dict[str, tuple[Solution, float]] = {}
        attempts: list[dict[str, Any]] = []
        while sum(attempt["equal"] is not None for attempt in attempts) < num_kills:
            if len(attempts) == 3 * num_kills:
                raise SystemExit("nearly every kill comes before anything is saved")
            problem = problems[len(attempts) % len(problems)]
            if problem.unique_id not in whole:
                start = time.perf_counter()
                solution = self._solver.solve(problem.problem, problem_id=problem.unique_id)
                whole[problem.unique_id] = solution, time.perf_counter() - start
            expected, took_s = whole[problem.unique_id]
            attempt = self._attempt(problem, expected, draw.random() * took_s)
            attempts.append(attempt)
            say(f"  {self._dtype} {len(attempts)}: {attempt}")
        return self._summary(attempts)

    def _attempt(self, problem: Problem, expected: Solution, after_s: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "search.json"
            order = {
                "options": self._options,
                "threads": self._threads,
                "problem": problem.problem,
                "id": problem.unique_id,
                "file": str(file),
            }
            killed = kill_one(order, after_s)
            found: dict[str, Any] = {
                "problem": problem.unique_id,
                "after_s": round(after_s, 3),
                "killed": killed,
                "round": None,
                "rounds": expected.rounds,
                "equal": None,
            }
            if not file.exists():
                return found
            saved = read_checkpoint(file).tree
            again = self._solver.resume(file)
            before = sum(len(node.token_ids) for node in saved.nodes() if node.parent)
            return {
                **found,
                "round": saved.rounds,
                "equal": again.tree_hash == expected.tree_hash,
                "tokens_after": expected.tokens.generated - before,
                "recomputed_tokens": again.kv.recomputed_tokens,
            }

    def _summary(self, attempts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        resumed = [attempt for attempt in attempts if attempt["equal"] is not None]
        # Only these draw from KV that was computed again.
        midway = [attempt for attempt in resumed if attempt["recomputed_tokens"]]
        tokens = sum(attempt["tokens_after"] for attempt in midway)
        flips = sum(not attempt["equal"] for attempt in resumed)
        return {
            "dtype": self._dtype,
            "kills": sum(attempt["killed"] for attempt in attempts),
            "unsaved": len(attempts) - len(resumed),
            "ended": sum(not attempt["killed"] for attempt in attempts),
            "resumed": len(resumed),
            "midway": len(midway),
            "equal": len(resumed) - flips,
            "tokens": tokens,
            "flips_per_million": round(flips / tokens * 1e6, 2) if tokens else None,
            "attempts": list(attempts),
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Is a resumed tree the uninterrupted one?")
    parser.add_argument("--kills", type=int, default=30, help="that leave something to resume")
    parser.add_argument("--problems", type=int, default=5, help="of bundled:test")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=int, default=1, help="seed of the moments")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--be-killed", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.be_killed:
        be_killed(args.be_killed)
        return
    problems = load_problems("bundled:test", args.problems).problems
    sides = [
        Kills(dtype, args).run(problems, args.kills, random.Random(args.draw))
        for dtype in ("float64", "float32")
    ]
    say(table(sides, _COLUMNS))
    exact = sides[0]
    ok = exact["equal"] == exact["resumed"] > 0
    result = {"n": args.n, "width": args.width, "problems": len(problems), "sides": sides, "ok": ok}
    finish("resume_kills", result)


if __name__ == "__main__":
    main()
