"""Are answers judged as a person judges them? Pairs of a file, beside `math-verify` alone.

A line of the file is `{"id", "gold", "text", "right", "debatable"}`: the right answer, a reply, and
what a person says. The reply is read by `extract_answer` and judged by `AnswerChecker`; alone,
`math-verify` reads and judges it with its default settings. Prints each pair that either of them
judges otherwise, and a table: a reply with a box tests the judge, every other one the reader, too.

    python -m beamwright_lab.checks.pairs FILE
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

from math_verify import parse, verify

from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.search.answers import extract_answer
from beamwright_lab.common import say, table

KINDS = {(True, False): "false positives", (False, True): "false negatives"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    lines = parser.parse_args().file.read_text("utf-8").splitlines()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with AnswerChecker() as checker:
        for pair in map(json.loads, lines):
            gold, text = pair["gold"], pair["text"]
            answer = extract_answer(text)
            said = {
                "us": bool(checker.judge(gold, [answer])[answer]),
                "alone": bool(verify(parse(f"\\boxed{{{gold}}}"), parse(text))),
            }
            kinds = {who: KINDS.get((yes, pair["right"]), "right") for who, yes in said.items()}
            place = "debatable" if pair["debatable"] else "box" if "\\boxed" in text else "text"
            for who, kind in kinds.items():
                counts[f"{place}, {who}"].update([kind, "pairs"])
            if {*kinds.values()} != {"right"}:
                say({**pair, "answer": answer, **kinds})
    rows = [{"judged": who, **found} for who, found in sorted(counts.items())]
    say(table(rows, ("judged", "pairs", "right", *KINDS.values())))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
