"""Checks a model of your own with random sets of options: is the tree always the expected one?

A set has two halves. One decides the tree: dtype, attention, strategy, steps, sampling. It is first
searched alone with all KV on the device. The other must not change the tree: schedule, KV memory
(down to the least that a path needs), executor, speculation, drafts, batching. Some sets are also
resumed from the checkpoint of their first round. The outcome of a set is
- good: `equal`; `inexact` (another tree, and the run said `exact: false`); `refused` in one line;
  `capacity` (KV memory below the least, or the schedule needs more);
- bad: another tree under `exact`, a traceback, too little KV memory although the least was given,
  or a default that fails where `--schedule locality` or `PLAINEST` works.

    python -m beamwright_lab.checks.options --model FILE.gguf --sets 300

`--only 17` repeats set 17. `--matrix` runs one search for each dtype, share of its KV and schedule.
Models are loaded once, and models of one kind share one self-test.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from beamwright import Solution, Solver
from beamwright.cli.app import main as beamwright
from beamwright.engine import selftest
from beamwright.errors import BeamwrightError, CapacityError, InputError
from beamwright.models.load import has_bfloat16, load_model
from beamwright.solver import machinery, memory
from beamwright_lab.common import finish, say, table

Options = dict[str, Any]

# A search alone, with all KV on the device and nothing decoded ahead.
PLAIN: Options = {"schedule": "in-gpu", "executor": "plain", "speculation": "off"}
GOOD = ("equal", "refused", "capacity", "inexact")

NUMBERS: dict[str, list[Any]] = {
    "dtype": [None, None, None, "float32", "bfloat16" if has_bfloat16() else None],
    "weights": [None, None, None, None, "int8", "int4"],
    "kv_dtype": [None, None, None, None, "int8"],
    "attention": [None, None, None, "dense", "reference"],
}
DECIDE: dict[str, list[Any]] = {
    "search": [
        *("beam", "beam", "dvts", "best-of-n", "dynamic", "lookahead", "particles"),
        *("majority", "majority", "mcts", "revise"),
    ],
    "n": [2, 4, 4, 6],
    "width": [2, 2, 1],
    "max_rounds": [2, 4],
    "step_tokens": [None, 6, 6, 16],
    "max_tokens": [12, 20, 20, 40],
    "temperature": [None, None, 0, 1.2],
    "top_p": [None, None, None, 0.9],
    "verifier": [None, "logprob", "logprob"],
    "seed": [0, 61],
}
# Options that must not change a tree. kv_memory: a multiple of the least that a path needs.
FREE: dict[str, list[Any]] = {
    "schedule": [None, None, None, None, None, "locality", "in-gpu", "layerwise"],
    "kv_memory": [0.8, 1.0, 1.0, 1.0, 1.05, 1.3, 2.0, 4.0, None],
    "executor": ["plain", "overlapped", None, None],
    "speculation": ["off", "exact", "auto", None],
    "drafts": ["auto", "2", None, None],
    "verify_ahead": ["slack", None, None],
    "explore": ["lockstep", "continuous", "decoupled", None],
    "batching": ["grouped", "continuous", None, None],
    "write_back": ["eager", "lazy", None, None],
    "max_batch": [1, 3, None, None, None],
    "planner": ["greedy", None, None, None],
}
PLAINEST = {"schedule": "locality", "batching": "continuous", "speculation": "off"}

CELLS: Mapping[str, Options] = {
    "auto": {},
    "locality": {"schedule": "locality"},
    "grouped": {"batching": "grouped"},
    "layerwise": {"schedule": "layerwise"},
    "parked": {"batching": "continuous"},
    "speculation": {"speculation": "exact"},
    "resumed": {"resumes": True},
}
SHARES = {"100 %": 1.0, "60 %": 0.6, "35 %": 0.35, "least": 0.0}
HOW: Sequence[Mapping[str, str]] = ({}, {"dtype": "float32"}, {"weights": "int8"})
SHOWN = {"search": "beam", "verifier": "logprob", "n": 8, "width": 2, "max_rounds": 3}
PROBLEM = "Eva had 9 cards; she lost 4. How many?"


def outcome_of(error: Exception) -> dict[str, Any]:
    """Return the outcome of an error: its kind, or that it is not one line of text."""
    if "\n" in str(error) or not str(error):
        return {"outcome": "long line", "error": f"{type(error).__name__}: {error}"}
    kinds = {InputError: "refused", CapacityError: "capacity"}
    for kind, outcome in kinds.items():
        if isinstance(error, kind):
            return {"outcome": outcome, "error": str(error)}
    return {"outcome": "raised", "error": f"{type(error).__name__}: {error}"}


def run_random_sets(model: str, numbers: Sequence[int], seed: int) -> Options:
    """Run these sets one by one; each has its own random stream. Return counts and the bad sets."""
    counts: Counter[str] = Counter()
    bad: list[Options] = []
    for number in numbers:
        start, found = time.perf_counter(), draw_and_run(model, number, seed)
        counts[found["outcome"]] += 1
        bad += [] if found["outcome"] in GOOD else [found]
        say(f"  {time.perf_counter() - start:.1f} s {found}")
    return {"model": model, "seed": seed, "counts": dict(counts), "bad": bad, "ok": not bad}


def draw_and_run(model: str, number: int, seed: int) -> Options:
    """Draw and run a set, again if its options are refused. Sets near each other share the tree."""
    found: Options = {}
    for attempt in range(50):
        of_numbers, of_tree, draw = (
            random.Random(f"{seed} {name}")
            for name in (
                f"numbers {number // 20} {attempt // 25}",
                f"tree {number // 4} {attempt // 5}",
                f"{number} {attempt}",
            )
        )
        decide = {"model": model, **_draw(NUMBERS, of_numbers), **_draw(DECIDE, of_tree)}
        found = run_set(decide, _draw(FREE, draw), resumes=draw.random() < 0.5)
        if found["outcome"] != "refused":
            break
    return {"set": number, **found}


def _draw(values: Mapping[str, Sequence[Any]], draw: random.Random) -> Options:
    chosen = {name: draw.choice(several) for name, several in values.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def run_matrix(model: str) -> Options:
    """Run one search for each dtype of `HOW`, share of its KV and schedule of `CELLS`.

    Return the outcomes, and that of verifying the search's receipt with the same KV.
    """
    rows: list[Options] = []
    for how in HOW:
        decide = {"model": model, **SHOWN, "step_tokens": 16, **how}
        alone, least = _search_alone(tuple(decide.items()))
        for share, part in SHARES.items():
            budget = max(int(part * (alone.kv.device_peak_bytes or 0)), least)
            row = {"numbers": " ".join(how.values()) or "auto", "KV": share, "KiB": budget >> 10}
            for name, free in CELLS.items():
                row[name] = run_set(decide, {"kv_memory": budget, **free})["outcome"]
            rows.append({**row, "verify": _verify_receipt(alone, budget)})
            say(f"  {rows[-1]}")
    say(table(rows, [*rows[0]]))
    good = {"equal", "inexact", "refused"}  # layer-wise refuses layers with windows
    ok = all(row[name] in good for row in rows for name in (*CELLS, "verify"))
    return {"model": model, "rows": rows, "ok": ok}


# --- one search --------------------------------------------------------------------------------


def run_set(decide: Options, free: Options, *, resumes: bool = False) -> Options:
    """Return the outcome of a set. kv_memory: bytes, or a float as a multiple of the least."""
    told, enough = {"decide": decide, "free": free}, True
    try:
        alone, least = _search_alone(tuple(decide.items()))
    except BeamwrightError as error:
        return told | outcome_of(error)
    resumes, budget = free.get("resumes", resumes), free.get("kv_memory")
    free = {name: value for name, value in free.items() if name != "resumes"}
    if isinstance(budget, float):
        free["kv_memory"], enough = int(budget * least), budget >= 1
    found = told | {"least": least, "free": free, **_run_search({**decide, **free}, alone, resumes)}
    by_groups = free.get("schedule", "locality") == "locality"
    if found["outcome"] in ("capacity", "refused") and by_groups:
        plain = {**PLAINEST, "kv_memory": free.get("kv_memory")}
        plain = plain if found["outcome"] == "capacity" else {**free, "schedule": "locality"}
        if _run_search({**decide, **plain}, alone)["outcome"] == "equal":
            found["outcome"] = "default fails"
        elif found["outcome"] == "capacity" and enough:
            found["outcome"] = "least fails"
    return found


def _run_search(options: Options, alone: Solution, resumes: bool = False) -> Options:
    """Return the outcome of a search, and of resuming it from the checkpoint of its first round."""
    with tempfile.TemporaryDirectory() as folder, _reuse_models():
        file, half = Path(folder, "now"), Path(folder, "half")

        def keep(_: Any) -> None:
            if file.exists() and not half.exists():
                shutil.copy(file, half)

        try:
            with Solver(**options, system_prompt="") as solver:
                found = {"unequal": solver.solve(PROBLEM, checkpoint=file, on_round=keep)}
                if resumes and half.exists():
                    found["resumed otherwise"] = solver.resume(half)
        except BeamwrightError as error:
            return outcome_of(error)
        except Exception:
            return {"outcome": "raised", "error": traceback.format_exc()[-2000:]}
    for what, each in found.items():
        if each.tree_hash != alone.tree_hash:
            return {"outcome": what if each.exact else "inexact", "part": what}
    return {"outcome": "equal"}


def _verify_receipt(alone: Solution, budget: int) -> str:
    """Return the outcome of `beamwright verify` with this KV budget in bytes."""
    with tempfile.TemporaryDirectory() as folder, _reuse_models():
        file = Path(folder, "receipt.json")
        file.write_text(json.dumps(alone.receipt), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()):
            code = beamwright(["verify", str(file), "--kv-memory", str(budget)])
    return f"exit code {code}" if code else "equal"


@lru_cache(3)
def _search_alone(decide: tuple[tuple[str, Any], ...]) -> tuple[Solution, int]:
    """Return the search with all KV on the device, and the least KV in bytes that it needs."""
    with _reuse_models(), Solver(**dict(decide), **PLAIN, system_prompt="") as solver:
        found = solver.solve(PROBLEM)
        sizes, prompt = solver._machinery.sizes, len(found.tree.root.token_ids)
        return found, memory.least_kv_bytes(solver.settings, sizes, prompt)


def _cache_results(function: Callable[..., Any], key: Callable[..., object]) -> Callable[..., Any]:
    """Wrap a function so that its last six results are cached. key: makes the cache key."""
    kept: dict[object, Any] = {}

    def found(*args: Any, **named: Any) -> Any:
        known = str(key(*args))
        if known not in kept:
            while len(kept) >= 6:
                kept.pop(next(iter(kept)))
            kept[known] = function(*args, **named)
        return kept[known]

    return found


_LOADS = _cache_results(load_model, lambda *how: how)
_ASKS = _cache_results(
    selftest.batches_are_exact, lambda one, how: (one.self_test_key, one.least_rows, how.name)
)


@contextlib.contextmanager
def _reuse_models() -> Iterator[None]:
    """Take models and self-tests from a cache of the last few."""
    loads = patch.object(machinery, "load_model", _LOADS)
    with loads, patch.object(selftest, "batches_are_exact", _ASKS):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--sets", type=int, default=300)
    parser.add_argument("--only", type=int, help="run only this set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix", action="store_true", help="dtypes x KV budgets x schedules")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.matrix:
        finish("options_matrix", run_matrix(args.model))
        return
    numbers = range(args.sets) if args.only is None else [args.only]
    finish("options_random", run_random_sets(args.model, numbers, args.seed))


if __name__ == "__main__":
    main()
