"""Equal rows computed once, against every row by itself: rows, tokens a second; trees are the same.

`searches`: problems of bundled:test on the bundled models. `shares`: random weights of a larger
shape, whose texts repeat nothing, so that so many rows at a time draw from one random stream: how
many rows are equal is an input, the seconds are measured. Sides take turns in every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

from beamwright import Solution, Solver
from beamwright.engine.noise import lineage_key
from beamwright.engine.passes import DistinctPasses
from beamwright.engine.row import Row
from beamwright.evaluate.problems import load_problems
from beamwright_lab.common import finish, say, table
from beamwright_lab.engine.drafts import Measured, measured

_COLUMNS = (
    *("model", "n", "equal at a time", "passes", "rows alone", "rows", "equal tokens"),
    *("repeated tokens", "tokens/s alone", "tokens/s", "faster", "equal trees"),
)
_SIDES = ("alone", "once")


def searches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the bundled models."""
    problems = [p.problem for p in load_problems("bundled:test", args.problems).problems]
    for n in args.n:
        options = {"n": n, "width": min(n, 4), "executor": "plain", "speculation": "off"}
        yield _row("bundled", n, None, _found(options, problems, args.rounds))


def shares(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of random weights."""
    options = {"search": "best-of-n", "choose": "majority", "verifier": "none", "width": 1}
    options |= {"step_tokens": args.tokens, "max_tokens": args.tokens, "ignore_eos": True}
    options |= {"model": f"random:{args.shape}", "dtype": args.dtype}
    for n in args.n:
        for share in args.at_a_time:
            if share <= n:
                with _one_stream(share):
                    found = _found({**options, "n": n}, [args.prompt_tokens], args.rounds)
                yield _row(args.shape, n, share, found)


def _found(options: Mapping[str, Any], asked: Sequence[Any], rounds: int) -> dict[str, Measured]:
    """Both sides. Where nobody knows which rows are equal, each is computed by itself."""
    solvers = {side: Solver(**options) for side in _SIDES}
    passes: DistinctPasses = solvers["alone"]._machinery.batch._rows._passes
    passes.texts = None
    sides = {name: [(solver, each) for each in asked] for name, solver in solvers.items()}
    found = measured(sides, rounds)
    for solver in solvers.values():
        solver.close()
    return found


@contextmanager
def _one_stream(at_a_time: int) -> Iterator[None]:
    """So many siblings in a row draw the same tokens."""

    def key(row: Row) -> tuple[int, int]:
        problem, *ordinals = row.node.lineage
        return lineage_key(0, (problem, *(n // at_a_time for n in ordinals if isinstance(n, int))))

    shared = cached_property(key)
    shared.__set_name__(Row, "key")
    with patch.object(Row, "key", shared):
        yield


def _row(model: str, n: int, share: int | None, found: Mapping[str, Measured]) -> dict[str, Any]:
    (alone, alone_s), (once, once_s) = (found[side] for side in _SIDES)
    rates = [round(sum(s.tokens.generated for s in alone) / min(s)) for s in (alone_s, once_s)]
    equal = sum(a.tree_hash == b.tree_hash for a, b in zip(alone, once, strict=True))
    row = {
        "model": model,
        "n": n,
        "equal at a time": share,
        "passes": sum(s.batch.passes for s in once),
        "rows alone": _rows_computed(alone),
        "rows": _rows_computed(once),
        "equal tokens": sum(s.batch.equal_tokens for s in once),
        "repeated tokens": sum(s.tokens.repeated for s in once),
        "tokens/s alone": rates[0],
        "tokens/s": rates[1],
        "faster": round(min(alone_s) / min(once_s), 2),
        "equal trees": f"{equal} of {len(alone)}",
    }
    say(row)
    return row


def _rows_computed(solutions: Sequence[Solution]) -> int:
    """Of all passes, with padding."""
    stats = [s.batch for s in solutions if s.batch.rows_mean and s.batch.occupancy]
    tokens = (s.rows_mean * s.passes - s.equal_tokens for s in stats)
    return round(sum(n / s.occupancy for n, s in zip(tokens, stats, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["searches", "shares"])
    parser.add_argument("--n", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--problems", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    rows = [*searches(args)] if "searches" in args.what else []
    rows += shares(args) if "shares" in args.what else []
    print(table(rows, _COLUMNS))
    finish("equal-rows", {"rows": rows})


if __name__ == "__main__":
    main()
