"""Checks random combinations of the four papers' options: the tree must not change.

A set has two halves. One decides the tree: strategy, width, steps, sampling, sparse decoding. It is
also searched plainly: alone, all KV on the device, no speculation. The other must not change the
tree: LBS's schedules, FlashTTS's speculation and splits, the thesis's exploration modes, KV on the
host as in AsyncSpade, eviction, parking, drafts, batching, several problems in flight. Each tree
must be the plain one, or the solver must say in one line which options conflict or what does not
fit. Only `speculation=truncate` may grow another tree.

    python -m beamwright_lab.checks.papers --sets 200

Each set has its own random stream, so `--first 73 --sets 1` repeats set 73.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError, CapacityError, InputError
from beamwright.evaluate.problems import load_problems
from beamwright.schedule import SCHEDULES
from beamwright.sparse.rule import METHODS
from beamwright_lab.common import finish, say

Options = dict[str, Any]
Problem = tuple[str, str]
Make = Callable[..., Solver]

_SEARCHES = ("beam", "beam", "best-of-n", "dvts", "dynamic", "lookahead", "particles", "varying")
_FORESEES = ("beam", "dvts", "lookahead", "varying")
_BUDGETS = ("30KiB", "60KiB", "120KiB", "300KiB", "600KiB", "1MiB", "2MiB", "4MiB", "16MiB")

PLAIN: Mapping[str, Any] = {"schedule": "in-gpu", "executor": "plain", "speculation": "off"}

# Options that must not change the tree, except `speculation=truncate`.
FREE: Mapping[str, Sequence[Any]] = {
    # LBS
    "schedule": ["auto", "auto", "locality", "locality", "in-gpu", "layerwise"],
    "kv_memory": [*_BUDGETS, None],
    "planner": ["ranges", "ranges", "greedy"],
    "inter_beam": [True, True, False],
    "balance": [True, True, False],
    "prefetch": [True, True, False],
    "reuse": [True, True, False],
    "evict": ["host", "host", "host", "recompute"],
    "write_back": ["auto", "eager", "lazy"],
    "host_memory": [None, "16MiB", "200KiB"],
    "attention": ["auto", "auto", "auto", "tree", "dense"],
    # parking, continuous batching
    "batching": ["auto", "continuous", "grouped"],
    "max_batch": [None, None, 1, 3, 7],
    # FlashTTS
    "speculation": ["auto", "exact", "exact", "off", "truncate"],
    "foresight": ["scores", "bins", "bins"],
    "truncation": [0.0, 0.5, 0.85],
    "verify_ahead": ["never", "slack", "slack"],
    "split": ["auto", "auto", "0.2", "0.8"],
    # the thesis
    "explore": ["continuous", "lockstep", "decoupled"],
    "executor": ["auto", "plain", "overlapped"],
    # added after the papers
    "drafts": ["off", "off", "auto", "3"],
}

# Options that compute KV in another order: the tree is guaranteed in float64 only.
_ELSEWHERE = {"evict": "recompute", "attention": "dense"}


def draw_set(number: int, seed: int) -> tuple[Options, Options, int]:
    """Draw a set: options that decide the tree, options that must not, and problems in flight."""
    draw = random.Random(f"papers {seed} {number}")
    free = {name: draw.choice(values) for name, values in FREE.items()}
    # Half of the options keep their default, so that most sets run.
    free = {name: value for name, value in free.items() if draw.random() < 0.5}
    decide = _draw_deciding_options(draw)
    if decide.get("sparse") and draw.random() < 0.4:
        free["sparse_home"] = "host"
        free.setdefault("kv_memory", draw.choice(_BUDGETS))
    if draw.random() < 0.85:  # the rest check that conflicting options are refused
        free = {name: value for name, value in free.items() if _is_compatible(name, decide, free)}
    if any(free.get(name) == value for name, value in _ELSEWHERE.items()):
        decide["dtype"] = "float64"
    own = random.Random(f"verifiers {seed} {number}")  # so that older sets stay the same
    if free.get("executor") != "plain" and own.random() < 0.4:
        free["verifiers"] = own.choice([2, 3])
    return decide, {k: v for k, v in free.items() if v is not None}, draw.choice([1, 2, 3])


def _is_compatible(name: str, decide: Options, free: Options) -> bool:
    """Return whether an option is compatible with the others, as far as known here."""
    schedule, sparse = free.get("schedule"), "sparse" in decide
    if free.get("sparse_home") == "host" and name == "schedule":
        return False
    if sparse and name in ("drafts", "evict", "attention"):
        return False
    if sparse and (name, schedule) == ("schedule", "layerwise"):
        return False
    if name == "foresight" and decide["search"] not in _FORESEES:
        return False
    idle = SCHEDULES[str(schedule)].unused_options if schedule else ()
    return name not in idle or "sparse_home" in free


def _draw_deciding_options(draw: random.Random) -> Options:
    width = draw.choice([1, 2, 4])
    found: Options = {
        "search": draw.choice(_SEARCHES),
        "n": width * draw.choice([1, 2, 3]),
        "width": width,
        "max_rounds": draw.choice([1, 3, 5]),
        "seed": draw.choice([0, 7, 2**40]),
        "temperature": draw.choice([0, 0.3, 1.0, 1.0]),
    }
    found |= draw.choice(
        [
            {"max_step_tokens": draw.choice([1, 5, 16, 40])},
            {"step_tokens": draw.choice([1, 7, 16, 17]), "ignore_eos": draw.random() < 0.5},
            {"step_limits": draw.choice(["3,20", "16,1,8"])},
            {"delimiter": draw.choice(["e", ". "])},
        ]
    )
    if found["search"] == "varying":
        found.pop("step_tokens", None)
    found |= {"max_tokens": draw.choice([12, 40, 90])} if draw.random() < 0.5 else {}
    found |= {"top_k": 3} if draw.random() < 0.2 else {}
    found |= {"verify_every": 2} if draw.random() < 0.2 else {}
    found |= {"filter_duplicates": True} if draw.random() < 0.2 else {}
    if draw.random() < 0.4:
        found["sparse"] = _draw_method(draw)
        found["select"] = draw.choice([16, 24, "1/4"])
        found["sparse_from"] = draw.choice([0, 30])
        found["sparse_layers"] = draw.choice([0, 0, 1])
        if found["sparse"].startswith("a"):
            found |= {"sparse_correct": 0.6} if draw.random() < 0.3 else {}
    return found


def _draw_method(draw: random.Random) -> str:
    """Draw a sparse method with random options, in the form of `--sparse`."""
    name, share = draw.choice([*METHODS]), draw.choice([1, 1, 2])
    options = [f"share={share}"] if share > 1 else []
    options += ["each=query"] if draw.random() < 0.3 else []
    if METHODS[name].query == "predicted":
        options += [f"pack={share * draw.choice([1, 2])}"] if draw.random() < 0.5 else []
        options += ["window=path"] if draw.random() < 0.5 else []
    return ",".join([name, *options])


def run_set(
    make: Make, decide: Options, free: Options, in_flight: int, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Run a set and return its outcome.

    Good: `equal`, `truncated` (another tree, as asked), `refused`, `capacity`, `inexact`. Bad:
    `unequal`, `raised`, `long line`.
    """
    try:
        with make(**{**free, **decide}) as solver:
            exact = solver.exact
            found = dict(solver.solve_many(list(problems), in_flight=in_flight))
            outcomes = [found[key] for key, _ in problems]
            _check_empty(solver)
    except BeamwrightError as error:
        return outcome_of(error)
    except Exception:
        return {"outcome": "raised", "error": traceback.format_exc()[-2000:]}
    errors = [each for each in outcomes if not isinstance(each, Solution)]
    if errors and not all(isinstance(each, CapacityError) for each in errors):
        return outcome_of(next(each for each in errors if not isinstance(each, CapacityError)))
    if free.get("speculation") == "truncate":
        return {"outcome": "truncated"}
    with make(**{**PLAIN, **decide}) as solver:
        expected = [solver.solve(text, problem_id=key).tree_hash for key, text in problems]
    hashes = [each.tree_hash if isinstance(each, Solution) else None for each in outcomes]
    if any(own not in (None, plain) for own, plain in zip(hashes, expected, strict=True)):
        return {"outcome": "unequal" if exact else "inexact", "hashes": hashes}
    return outcome_of(errors[0]) if errors else {"outcome": "equal"}


def outcome_of(error: Exception) -> dict[str, Any]:
    """Return the outcome of an error: its kind, or that it is not one line of text."""
    if "\n" in str(error) or not str(error):
        return {"outcome": "long line", "error": f"{type(error).__name__}: {error}"}
    kinds = {InputError: "refused", CapacityError: "capacity"}
    for kind, outcome in kinds.items():
        if isinstance(error, kind):
            return {"outcome": outcome, "error": str(error)}
    return {"outcome": "raised", "error": f"{type(error).__name__}: {error}"}


def _check_empty(solver: Solver) -> None:
    """Check that no memory is in use after all searches have ended."""
    for level, use in solver.usage().levels.items():
        assert not use.used_bytes, f"{level}: {use.used_bytes} bytes are still held"


# Seconds after which a set counts as hanging; then all stacks are printed.
_HANGS_S = 300

GOOD = ("equal", "truncated", "refused", "capacity", "inexact")


def run_sets(numbers: Sequence[int], seed: int, make: Make, problems: Sequence[Problem]) -> Options:
    """Run sets. Return counts by outcome, and the bad sets in full."""
    counts: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    bad: list[Options] = []
    for number in numbers:
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        decide, free, in_flight = draw_set(number, seed)
        found = run_set(make, decide, free, in_flight, problems)
        counts[found["outcome"]] += 1
        if found["outcome"] in ("refused", "capacity"):
            lines[found["error"]] += 1
        if found["outcome"] not in GOOD:
            bad.append({"set": number, "decide": decide, "free": free, "in_flight": in_flight})
            bad[-1] |= found
            say(f"  BAD {bad[-1]}")
        say(f"  {number} {found['outcome']} {found.get('error', '')[:110]}")
    faulthandler.cancel_dump_traceback_later()
    return {"seed": seed, "counts": dict(counts), "lines": dict(lines), "bad": bad, "ok": not bad}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="bundled")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problems = [
        (each.unique_id, each.problem) for each in load_problems("bundled:test", 3).problems
    ]

    def make(**options: Any) -> Solver:
        return Solver(model=args.model, **options)

    numbers = range(args.first, args.first + args.sets)
    finish("papers_random", run_sets(numbers, args.seed, make, problems))


if __name__ == "__main__":
    main()
