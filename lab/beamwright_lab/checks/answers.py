"""How many of 200 answer pairs our checker and `math-verify` alone judge as a mathematician does.

The pairs and verdicts (tests/data/answer_pairs.jsonl) were written by hand, before any rule was
tuned to them; the rules were then written with these pairs in sight, so ours is no held-out
figure. `--pairs` takes another file of the same fields. `math-verify` alone gets both answers as
`\\boxed{...}` with its default settings, in this process; an exception counts as "different".
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beamwright.evaluate.equivalence import AnswerChecker
from beamwright_lab.common import finish, say, table

PAIRS = Path(__file__).resolve().parents[3] / "tests" / "data" / "answer_pairs.jsonl"
SIDES = ("ours", "math-verify")


def ours(pairs: Sequence[dict[str, Any]], num_workers: int) -> list[bool | None]:
    with (
        AnswerChecker(num_workers=num_workers) as checker,
        ThreadPoolExecutor(num_workers) as threads,
    ):
        return list(threads.map(lambda pair: checker.compare(pair["gold"], pair["answer"]), pairs))


def math_verify_alone(pairs: Sequence[dict[str, Any]]) -> list[bool | None]:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    verdicts: list[bool | None] = []
    for pair in pairs:
        try:
            gold, answer = (parse(f"\\boxed{{{pair[key]}}}") for key in ("gold", "answer"))
            verdicts.append(bool(verify(gold, answer)))
        except Exception as error:
            say(f"math-verify on {pair}: {type(error).__name__}")
            verdicts.append(False)
    return verdicts


def count(
    pairs: Sequence[dict[str, Any]], verdicts: dict[str, list[bool | None]]
) -> list[dict[str, Any]]:
    """A row for every kind, in the order of the file, and one for all."""
    right = {
        side: [
            verdict is pair["equal"] for pair, verdict in zip(pairs, verdicts[side], strict=True)
        ]
        for side in SIDES
    }
    rows = []
    for kind in [*dict.fromkeys(pair["kind"] for pair in pairs), None]:
        chosen = [i for i, pair in enumerate(pairs) if kind in (None, pair["kind"])]
        counts = {side: sum(right[side][i] for i in chosen) for side in SIDES}
        rows.append({"kind": kind or "all", "pairs": len(chosen), **counts})
    return rows


def wrong(pairs: Sequence[dict[str, Any]], verdicts: Sequence[bool | None]) -> list[dict[str, Any]]:
    return [
        {**pair, "verdict": verdict}
        for pair, verdict in zip(pairs, verdicts, strict=True)
        if verdict is not pair["equal"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    pairs = [json.loads(line) for line in args.pairs.read_text(encoding="utf-8").splitlines()]
    start = time.perf_counter()
    verdicts = {"ours": ours(pairs, args.workers)}
    seconds = time.perf_counter() - start
    verdicts["math-verify"] = math_verify_alone(pairs)
    rows = count(pairs, verdicts)
    say(table(rows, ["kind", "pairs", *SIDES]))
    mistakes = {side: wrong(pairs, verdicts[side]) for side in SIDES}
    for side in SIDES:
        say(f"\n{side}, wrong:")
        for each in mistakes[side]:
            pair = f"{each['kind']}: {each['gold']}  |  {each['answer']}"
            say(f"  {pair}  is {each['equal']}, judged {each['verdict']}")
    false_equals = {side: sum(each["verdict"] is True for each in mistakes[side]) for side in SIDES}
    name = "answer_conformance" if args.pairs == PAIRS else f"answer_conformance-{args.pairs.stem}"
    result = {"rows": rows, "wrong": mistakes, "false_equals": false_equals}
    finish(name, {"math_verify": version("math-verify"), "ours_s": round(seconds, 2), **result})


if __name__ == "__main__":
    main()
