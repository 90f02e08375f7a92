"""Votes in waves, replayed over the paths of a whole vote: tokens that `--stop-confidence` spares.

    python -m beamwright_lab.waves

The whole vote is run, or read from its results. Its first k paths are those of a vote that stops
behind k, so each line is what the search would have done.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from beamwright import Settings
from beamwright.engine.decisions import confidence_of
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record
from beamwright.evaluate.problems import load_problems
from beamwright.search.choose import choose
from beamwright.tree import COMPLETE_STOPS
from beamwright_lab.common import RESULTS, finish, table
from beamwright_lab.evaluated import beside, records_of


def run_of(args: argparse.Namespace, checker: AnswerChecker) -> list[Record]:
    model = {"model": args.model, "verifier": "none", "search": "majority"}
    settings = Settings.build(**model, n=args.n, seed=args.seed)
    problems = load_problems(args.dataset, args.limit)
    name = f"{args.model.replace(':', '-')}-{args.n}-{args.limit}-seed{args.seed}"
    out = RESULTS / "waves" / name
    return records_of(settings, problems, checker, out, "the whole vote", args.in_flight)


def spent(paths: Sequence[Mapping[str, Any]], wave: int, sure: float) -> int:
    """How many of these paths a vote in waves draws."""
    for count in range(wave, len(paths), wave):
        voted = [each["vote"] for each in paths[:count] if each["stop"] in COMPLETE_STOPS]
        if confidence_of(vote for vote in voted if vote is not None) >= sure:
            return count
    return len(paths)


def is_right(
    paths: Sequence[Mapping[str, Any]], verdicts: Mapping[str | None, bool | None]
) -> float:
    complete = [each["stop"] in COMPLETE_STOPS for each in paths]
    votes, scores = [each["vote"] for each in paths], [each["score"] for each in paths]
    return float(bool(verdicts[paths[choose(votes, scores, complete, "majority")]["answer"]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bundled:thinking")
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    with AnswerChecker() as checker:
        records: Sequence[Record] = run_of(args, checker)
        known = [checker.judge(r.gold, [each["answer"] for each in r.candidates]) for r in records]
    pools = [(record.candidates, verdicts) for record, verdicts in zip(records, known, strict=True)]

    def line(name: str, counts: Sequence[int]) -> dict[str, Any]:
        taken = [paths[:count] for (paths, _), count in zip(pools, counts, strict=True)]
        right = [is_right(p, verdicts) for p, (_, verdicts) in zip(taken, pools, strict=True)]
        tokens = sum(each["tokens"] for paths in taken for each in paths) / len(taken)
        return {"vote": name, "right": right, "tokens": tokens}

    whole = line("the whole vote", [len(paths) for paths, _ in pools])
    lines = [whole, *(line(f"{k} paths", [k] * len(pools)) for k in (4, 8, 12) if k < args.n)]
    for wave in (1, 2, 4):
        for sure in (0.8, 0.9, 0.95, 0.99):
            counts = [spent(paths, wave, sure) for paths, _ in pools]
            lines.append(line(f"waves of {wave}, {sure}", counts))
    rows = []
    for each in lines:
        rows.append({
            "vote": each["vote"],
            **beside(each["right"], whole["right"]),
            "tokens / problem": round(each["tokens"]),
            "of the first's": round(each["tokens"] / whole["tokens"], 3),
        })  # fmt: skip
    print(table(rows, list(rows[0])))
    finish("waves", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
