"""What batching gives on this machine: step time against rows, slots, and problems in flight.

Three tables on the bundled pair, all cases of a table interleaved:

    curve    milliseconds of a decode step, and of scoring a step, at 8 to 512 rows
    slots    one search of 64 paths with 16 slots: continuous against grouped, and without a limit
    flight   problems one at a time against 16 in flight, each search of 4 paths

    python -m beamwright_lab.engine.batching --problems 128 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from beamwright import Solver
from beamwright.evaluate import load_problems
from beamwright.kv.segments import PathPart
from beamwright.models.tree_model import PrefillRequest, TreeModel

ROWS = (8, 16, 32, 64, 128, 256, 512)
PROMPT_TOKENS, STEP_TOKENS = 64, 24


def interleaved(
    cases: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, tuple[list[float], Any]]:
    """Seconds of each repeat, and the last result, of every case."""
    found: dict[str, tuple[list[float], Any]] = {name: ([], None) for name in cases}
    for repeat in range(repeats + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            result = run()
            if repeat:  # the first warms up
                found[name] = ([*found[name][0], time.perf_counter() - start], result)
    return found


@torch.inference_mode()
def decode_steps(model: TreeModel, num_rows: int) -> float:
    """Seconds of a decode step of so many rows behind one prompt."""
    store = model.store
    root = store.create()
    model.prefill([PrefillRequest((), root, [1] * PROMPT_TOKENS, 0)])
    segments = [store.create() for _ in range(num_rows)]
    session = model.open_session([(PathPart(root, PROMPT_TOKENS),)] * num_rows, segments)
    tokens = torch.ones(session.num_rows, dtype=torch.long)
    session.forward(tokens, tokens + PROMPT_TOKENS)
    start = time.perf_counter()
    for step in range(STEP_TOKENS):
        hidden = session.forward(tokens, tokens + PROMPT_TOKENS + step)
        model.decoder.logits(hidden)
    took_s = (time.perf_counter() - start) / STEP_TOKENS
    session.close()
    for segment in [root, *segments]:
        store.free(segment)
    return took_s


@torch.inference_mode()
def score_steps(model: TreeModel, num_rows: int) -> float:
    """Seconds of a prefill of so many steps of `STEP_TOKENS` behind one prompt."""
    store = model.store
    root = store.create()
    model.prefill([PrefillRequest((), root, [1] * PROMPT_TOKENS, 0)])
    path = (PathPart(root, PROMPT_TOKENS),)
    segments = [store.create() for _ in range(num_rows)]
    requests = [PrefillRequest(path, s, [1] * STEP_TOKENS, PROMPT_TOKENS) for s in segments]
    start = time.perf_counter()
    model.prefill(requests)
    took_s = time.perf_counter() - start
    for segment in [root, *segments]:
        store.free(segment)
    return took_s


def curve(repeats: int) -> None:
    """Step time against rows, for both models."""
    print("rows | decode step, ms (min, median) | us per row | scoring a step, ms | us per row")
    with Solver(model="bundled", verifier="bundled", kv_memory="2GiB") as solver:
        models = solver._machinery.tree_models
        with solver.threads.in_use():
            for num_rows in ROWS:
                steps = [decode_steps(models[0], num_rows) for _ in range(repeats + 1)][1:]
                scored = [score_steps(models[1], num_rows) for _ in range(repeats + 1)][1:]
                least, middle = (1e3 * pick(steps) for pick in (min, statistics.median))
                score = 1e3 * min(scored)
                per_row = (
                    f"{1e3 * least / num_rows:.0f} | {score:.1f} | {1e3 * score / num_rows:.0f}"
                )
                print(f"{num_rows} | {least:.2f}, {middle:.2f} | {per_row}", flush=True)


def show(found: Mapping[str, tuple[list[float], Any]], solvers: Mapping[str, Solver]) -> None:
    """Seconds and occupancy of every case."""
    print("case | seconds (min, median) | occupancy | iterations | preempted")
    for name, (seconds, _) in found.items():
        counts = solvers[name].usage().engine
        share = counts.row_tokens / counts.slot_tokens
        least, middle = min(seconds), statistics.median(seconds)
        print(
            f"{name} | {least:.2f}, {middle:.2f} | {share:.2f} | {counts.iterations} | "
            f"{counts.preempted}"
        )


def slots(problems: Sequence[tuple[str, str]], repeats: int) -> None:
    """One search of 64 paths, problem after problem."""
    options: dict[str, dict[str, Any]] = {
        "16 slots, continuous": {"max_batch": 16, "batching": "continuous"},
        "16 slots, grouped": {"max_batch": 16, "batching": "grouped"},
        "no limit": {},
    }
    made = {
        name: Solver(model="bundled", verifier="bundled", n=64, width=4, **each)
        for name, each in options.items()
    }

    def solve(solver: Solver) -> list[str]:
        return [solver.solve(text, problem_id=name).tree_hash for name, text in problems]

    found = interleaved({name: lambda s=s: solve(s) for name, s in made.items()}, repeats)  # type: ignore[misc]
    assert len({tuple(hashes) for _, hashes in found.values()}) == 1, "the trees differ"
    show(found, made)


def flight(problems: Sequence[tuple[str, str]], repeats: int) -> None:
    """Problems one at a time, and 16 in flight."""
    made = {
        name: Solver(model="bundled", verifier="bundled", n=4, width=2)
        for name in ("one at a time", "16 in flight")
    }

    def together(solver: Solver, size: int) -> list[str]:
        found = []
        for start in range(0, len(problems), size):
            found += solver.solve_many(problems[start : start + size])
        return [each.tree_hash for each in found]  # type: ignore[union-attr]

    cases = {
        name: lambda s=solver, n=size: together(s, n)  # type: ignore[misc]
        for (name, solver), size in zip(made.items(), (1, 16), strict=True)
    }
    found = interleaved(cases, repeats)
    assert len({tuple(hashes) for _, hashes in found.values()}) == 1, "the trees differ"
    show(found, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", nargs="+", default=["curve", "slots", "flight"])
    args = parser.parse_args()
    found = load_problems("bundled:test", limit=args.problems).problems
    problems = [(each.unique_id, each.problem) for each in found]
    if "curve" in args.tables:
        curve(args.repeats)
    if "slots" in args.tables:
        slots(problems[:4], args.repeats)
    if "flight" in args.tables:
        flight(problems, max(1, args.repeats // 2))


if __name__ == "__main__":
    main()
