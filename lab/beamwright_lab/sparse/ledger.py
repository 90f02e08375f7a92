"""Ledger benchmark: accuracy of sparse decoding on long solutions that look up earlier results.

A `Solver` with the given options decodes problems of `training/ledger.py` greedily, in two variants
and several lengths (tokens of prompt and solution). Columns are means over a row's problems:

- recall: correct look-ups, as a share of written statements; looked_up: of all statements
- added: correct sums; copied: statements that are the expected ones
- right_tokens: share of the solution before its first wrong token
- answered: correct answers; complete: solutions that are correct in every token

    python -m beamwright_lab.sparse.ledger
    python -m beamwright_lab.sparse.ledger --tokens 4096 --option dtype=bfloat16
    python -m beamwright_lab.sparse.ledger --methods off exact --option sparse_from=0
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from beamwright import Solver
from beamwright_lab.common import fingerprint, finish, say, table

MODEL = Path(__file__).parent / "ledger_model"
TRAINING = Path(__file__).resolve().parents[3] / "training"
SELECTS = re.compile(r"select$|sparse_")
LENGTHS = (256, 1024, 2048, 4096, 8000)
COLUMNS = (
    "sparse", "variant", "tokens", "problems", "statements", "recall", "looked_up", "added",
    "copied", "right_tokens", "answered", "complete", "tokens/s",
)  # fmt: skip


def load_maker() -> ModuleType:
    """Import `training/ledger.py`, a script outside the package that generates the problems."""
    spec = importlib.util.spec_from_file_location("training_ledger", TRAINING / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def option(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`, a Solver option with a value in YAML."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"option {text!r} is not of the form NAME=VALUE")
    return name.replace("-", "_"), yaml.safe_load(value)


def row(
    solver: Solver, maker: ModuleType, length: int, num: int, announced: bool, seed: int
) -> dict[str, Any]:
    """Decode and check the problems of one variant and length."""
    found = maker.ledgers(length, num, announced, seed)
    verdicts, generated, begin = [], 0, time.perf_counter()
    for each in found:
        limit = len(maker.solution_pieces(each))
        solution = solver.solve(maker.question_text(each), max_tokens=limit)
        verdicts.append(maker.judge(each, solution.candidates[0].text))
        generated += solution.candidates[0].tokens
    seconds = time.perf_counter() - begin
    shown = {
        "variant": maker.ANNOUNCED if announced else maker.PLAIN,
        "tokens": length,
        "problems": num,
        "statements": sum(len(each.statements) for each in found),
        "settled": solver.settings.sparse.sparse,
        **{name: round(value, 4) for name, value in maker.mean_verdict(verdicts).items()},
        "tokens/s": round(generated / seconds),
    }
    say(*(f"{name} {value}" for name, value in shown.items()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths")
    parser.add_argument("--variants", nargs="+", default=["plain", "announced"])
    parser.add_argument("--methods", nargs="+", default=["off"], help="sparse decoding methods")
    parser.add_argument("--problems", type=int, help="problems per row (default: 16384 / tokens)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="Solver option; repeatable",
    )  # fmt: skip
    args = parser.parse_args()
    maker, options = load_maker(), dict(args.option)
    defaults = {"verifier": "none", "search": "best-of-n", "n": 1, "temperature": 0.0}
    rows = []
    for method in args.methods:
        own = {"sparse": method, **options}
        if method == "off":  # options of selection do not apply
            own = {name: value for name, value in own.items() if not SELECTS.match(name)}
        with Solver(**{**defaults, **own}, model=args.model) as solver:
            rows += [
                {"sparse": method}
                | row(solver, maker, length, args.problems or max(2, 16384 // length),
                      variant == maker.ANNOUNCED, args.seed)
                for length in args.tokens
                for variant in args.variants
            ]  # fmt: skip
    say(table(rows, COLUMNS))
    finish("sparse_ledger", {"model": fingerprint(args.model), "options": options, "rows": rows})


if __name__ == "__main__":
    main()
