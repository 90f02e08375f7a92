"""What is lost, and saved, where the verifier scores every g-th step only (VG-Search).

    python -m beamwright_lab.verify_every

Each g is a beam search of its own on the same problems; accuracies are compared in pairs, tokens
are those that were generated, and those that the verifier read. A g that no path reaches scores
whole replies alone: beam search is then best-of-n.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from beamwright import Settings
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record
from beamwright.evaluate.problems import load_problems
from beamwright_lab.common import RESULTS, finish, table
from beamwright_lab.evaluated import beside, records_of, right_of, tokens_of


def run_of(every: int, args: argparse.Namespace, checker: AnswerChecker) -> list[Record]:
    settings = Settings.build(
        search=args.search, n=args.n, seed=args.seed, temperature=0.8, verify_every=every
    )
    problems = load_problems(args.dataset, args.limit)
    name = f"{args.search}-{args.n}-{args.limit}-seed{args.seed}-every{every}"
    out = RESULTS / "verify-every" / name
    return records_of(settings, problems, checker, out, f"every {every}", args.in_flight)


def row(every: int, records: Sequence[Record], first: Sequence[Record]) -> dict[str, Any]:
    """A line of the table. first: of the g that the others are compared with."""

    return {
        "every": every,
        **beside(right_of(records), right_of(first)),
        "generated / problem": round(tokens_of(records, "generated")),
        "verifier read / problem": round(tokens_of(records, "verifier_prefilled")),
        "rounds": round(float(np.mean([record.rounds or 0 for record in records])), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--search", default="beam")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 2, 4, 100])
    parser.add_argument("--in-flight", type=int, default=4, help="problems solved together")
    args = parser.parse_args()
    with AnswerChecker() as checker:
        found = {every: run_of(every, args, checker) for every in args.every}
    rows = [row(every, records, found[args.every[0]]) for every, records in found.items()]
    print(table(rows, list(rows[0])))
    finish("verify_every", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
