"""A verifier inside the generator beside the bundled reward model, and beside one's own confidence.

For each generator and verifier: best of n and weighted vote among the first 4 and all 16 samples,
beam search with 4 and 16, on test problems; verifier seconds, tokens that it read, and differences
in pairs. Heads come from `beamwright probe train`. Every search is an `eval` run of its own under
`results/probe/`, so a run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beamwright import Settings
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record, estimate_mean
from beamwright.evaluate.problems import load_problems
from beamwright.models.digest import digest_of
from beamwright.search.choose import Choice, choose
from beamwright.tree import COMPLETE_STOPS
from beamwright_lab.common import RESULTS, finish, table
from beamwright_lab.evaluated import records_of

_HOW: Mapping[str, Choice] = {"best-of-n": "best", "weighted vote": "weighted", "vote": "majority"}
_COLUMNS = ("verifier", "method", "n", "right", "verifier s", "tokens read", "less bundled", "95 %")


def run_of(
    search: str, n: int, verifier: str, args: argparse.Namespace, checker: AnswerChecker
) -> list[Record]:
    settings = Settings.build(
        model=args.model, verifier=verifier, search=search, n=n, seed=args.seed
    )
    kind, _, file = verifier.partition(":")
    own = f"{kind}-{digest_of(Path(file))['sha256'][:8]}" if file else kind
    out = RESULTS / "probe" / f"{args.model.replace(':', '-')}-{search}-{n}-{own}-{args.seed}"
    problems = load_problems(args.dataset, args.limit)
    return records_of(settings, problems, checker, out, f"{search}, n={n}, {own}")


def rows_of(verifier: str, args: argparse.Namespace, checker: AnswerChecker) -> Iterator[Any]:
    """A verifier's lines: name, method, n, who is right, verifier seconds, tokens it has read."""
    most = max(args.n)
    records = run_of("best-of-n", most, verifier, args, checker)
    for n in args.n:
        for method, how in _HOW.items():
            right = [_chosen(record, n, how, checker) for record in records]
            yield [verifier, method, n, right, *(_spent(records) if n == most else (None, None))]
    for n in args.n:
        records = run_of("beam", n, verifier, args, checker)
        yield [verifier, "beam", n, [float(bool(r.correct)) for r in records], *_spent(records)]


def _chosen(record: Record, n: int, how: Choice, checker: AnswerChecker) -> float:
    """Whether the answer chosen among the first n is right."""
    some = record.candidates[:n]
    if not some:
        return 0.0
    complete = [each["stop"] in COMPLETE_STOPS for each in some]
    votes, scores = [each["vote"] for each in some], [each["score"] for each in some]
    answer = some[choose(votes, scores, complete, how)]["answer"]
    return float(bool(checker.judge(record.gold, [answer])[answer]))


def _spent(records: Sequence[Record]) -> tuple[float, int]:
    seconds = sum(record.time["verify_s"] or 0.0 for record in records)
    return seconds, sum(record.tokens["verifier_prefilled"] or 0 for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--head", required=True, help="file of `beamwright probe train`")
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--n", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines, base = list[dict[str, Any]](), dict[tuple[str, int], list[float]]()
    with AnswerChecker() as checker:
        for verifier in ("bundled", f"probe:{args.head}", "logprob"):
            for name, method, n, right, spent_s, read in rows_of(verifier, args, checker):
                against = base.setdefault((method, n), right)
                less = estimate_mean([a - b for a, b in zip(right, against, strict=True)])
                low, high = less["interval"] if less else (0.0, 0.0)
                lines.append(
                    {
                        "verifier": name.partition(":")[0],
                        "method": method,
                        "n": n,
                        "right": round(float(np.mean(right)), 3),
                        "verifier s": spent_s and round(spent_s, 2),
                        "tokens read": read,
                        "less bundled": f"{less['value'] if less else 0.0:+.3f}",
                        "95 %": f"{low:+.3f} to {high:+.3f}",
                    }
                )
    print(table(lines, _COLUMNS))
    finish("probe", {**vars(args), "rows": lines})


if __name__ == "__main__":
    main()
