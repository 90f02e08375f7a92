"""Votes that stop where the answer stands, against the whole vote: accuracy and tokens, in pairs.

    python -m beamwright_lab.probed_votes

Every line is a vote of the same paths on the same problems; the first is the one that the others
are compared with. Tokens are those of steps, and what probes have read and written beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from beamwright import Settings
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record
from beamwright.evaluate.problems import load_problems
from beamwright_lab.common import RESULTS, finish, table
from beamwright_lab.evaluated import beside, records_of, right_of, tokens_of

WAYS: Mapping[str, Mapping[str, Any]] = {
    "the whole vote": {},
    "settled votes (--stop-votes)": {"stop_votes": True},
    "16 tokens, window 2": {"probe_every": 16, "certainty_window": 2},
    "16 tokens, window 3": {"probe_every": 16, "certainty_window": 3},
    "32 tokens, window 2": {"probe_every": 32, "certainty_window": 2},
    "waves of 4, 0.95": {"wave": 4, "stop_confidence": 0.95},
    "waves of 4, 0.8": {"wave": 4, "stop_confidence": 0.8},
    "at every Wait, window 1": {
        "probe_every": 1,
        "thought_steps": "markers",
        "certainty_window": 1,
    },
    "at every Wait, window 2": {
        "probe_every": 1,
        "thought_steps": "markers",
        "certainty_window": 2,
    },
    "16, 2, half agree": {"probe_every": 16, "certainty_window": 2, "stop_probes": 0.5},
    "16, 3, half agree": {"probe_every": 16, "certainty_window": 3, "stop_probes": 0.5},
    "16, 3, repeats end": {"probe_every": 16, "certainty_window": 3, "prune_repeats": True},
    "16, 3, the first 8": {"probe_every": 16, "certainty_window": 3, "first_k": 8},
}


def run_of(way: str, args: argparse.Namespace, checker: AnswerChecker) -> list[Record]:
    model = {"model": args.model, "verifier": "none", "search": "majority"}
    settings = Settings.build(**model, n=args.n, seed=args.seed, **WAYS[way])
    problems = load_problems(args.dataset, args.limit)
    number = [*WAYS].index(way)
    name = f"{args.model.replace(':', '-')}-{args.n}-{args.limit}-seed{args.seed}-way{number}"
    out = RESULTS / "probed-votes" / name
    return records_of(settings, problems, checker, out, way, args.in_flight)


def row(way: str, records: Sequence[Record], first: Sequence[Record]) -> dict[str, Any]:
    """A line of the table. first: of the vote that the others are compared with."""

    spent = tokens_of(records, "generated", "probe_tokens", "probe_prefilled")
    return {
        "vote": way,
        **beside(right_of(records), right_of(first)),
        "generated / problem": round(tokens_of(records, "generated")),
        "probes wrote": round(tokens_of(records, "probe_tokens")),
        "probes read": round(tokens_of(records, "probe_prefilled")),
        "of the first's tokens": round(spent / tokens_of(first, "generated"), 3),
        "s / problem": round(float(np.mean([r.time.get("total_s") or 0.0 for r in records])), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bundled:thinking")
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], help="some of the lines")
    parser.add_argument("--in-flight", type=int, default=4, help="problems solved together")
    args = parser.parse_args()
    with AnswerChecker() as checker:
        found = {way: run_of(way, args, checker) for way in args.ways}
    rows = [row(way, records, found[args.ways[0]]) for way, records in found.items()]
    print(table(rows, list(rows[0])))
    finish("probed_votes", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
