"""Measures accuracy against n: one sample, greedy, votes, best-of-n, beam search, any of n.

It compares a weak and a strong generator under one verifier. By default these are the bundled ones;
the strong generator is the model that was fine-tuned into the verifier. Each configuration is an
`eval` run under `results/accuracy/`, which continues if it was stopped. Best-of-n runs once, with
the largest n: random streams are keyed by lineage, so its first candidates are those of a smaller
run. Prints the table and paired differences of docs/log/2026-11.md#weak-and-strong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamwright import Settings
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record, estimate_mean, wilson_interval
from beamwright.evaluate.problems import load_problems
from beamwright.models.hub import resolve_folder
from beamwright.search.choose import choose
from beamwright.sections import AnswerChoice
from beamwright.tree import COMPLETE_STOPS
from beamwright_lab.common import RESULTS, fingerprint, finish, say, table
from beamwright_lab.evaluated import records_of

_COLUMNS = ("generator", "method", "n", "accuracy", "95 % interval", "tokens / problem")
_VOTES: Mapping[str, AnswerChoice] = {
    "majority": "majority",
    "weighted vote": "weighted",
    "best-of-n": "best",
}


@dataclass(frozen=True)
class Evaluated:
    """The configuration of one `eval` run. generator: "weak" or "strong"."""

    generator: str
    method: str
    n: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AccuracyRow:
    """A table row. right: per problem 0 or 1, or for single samples the share that is right."""

    generator: str
    method: str
    n: int
    right: Sequence[float]
    tokens: float
    samples: int = 1

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.right))

    @property
    def interval(self) -> list[float]:
        """Return the 95 % interval: Wilson's, or by resampling problems whose values are shares."""
        if self.samples == 1:
            found = wilson_interval(self.accuracy, len(self.right))
        else:
            mean = estimate_mean(self.right)
            found = mean["interval"] if mean else None
        assert found is not None
        return found

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "generator": self.generator,
            "method": self.method,
            "n": self.n,
            "accuracy": round(self.accuracy, 4),
            "95 % interval": f"{low:.3f}-{high:.3f}",
            "low": round(low, 4),
            "high": round(high, 4),
            "tokens / problem": round(self.tokens),
        }


# --- runs ------------------------------------------------------------------------------------


def list_runs(args: argparse.Namespace) -> Iterator[Evaluated]:
    """Yield the runs, the smallest n first."""
    found = []
    for generator, model, sizes in (
        ("weak", args.model, args.n),
        ("strong", args.strong, args.strong_n),
    ):
        if model == "none" or not sizes:
            continue
        greedy = {"search": "best-of-n", "temperature": 0.0}
        most = {"search": "best-of-n"}
        found.append(Evaluated(generator, "greedy", 1, {"model": model, **greedy}))
        found.append(Evaluated(generator, "best-of-n", max(sizes), {"model": model, **most}))
        for method in args.methods:
            options = {"model": model, "search": method, "width": args.width}
            if method == "dynamic":
                del options["width"]
            found += [Evaluated(generator, method, n, options) for n in sizes]
    yield from sorted(found, key=lambda config: config.n)


def run_config(config: Evaluated, args: argparse.Namespace, checker: AnswerChecker) -> list[Record]:
    """Solve all problems of a run, or read the records of an earlier run."""
    defaults = {"temperature": args.temperature, "verifier": args.verifier}
    options = {**defaults, **config.options}
    settings = Settings.build(n=config.n, seed=args.seed, **options)
    folders = [_folder(options["model"], "generator"), _folder(options["verifier"], "verifier")]
    models = "-".join(fingerprint(folder) for folder in folders if folder is not None)
    dataset = args.dataset.replace("/", "_").replace(":", "_")
    name = f"{config.method}-{config.n}-{dataset}-seed{args.seed}-{models}"
    if (kept := options.get("kv_dtype", "auto")) != "auto":
        name += f"-kv-{kept}"
    out = RESULTS / "accuracy" / name
    problems = load_problems(args.dataset, args.limit)
    what = f"{config.generator}, {config.method}, n={config.n}"
    return records_of(settings, problems, checker, out, what, args.in_flight)


def _folder(spec: str, role: str) -> Path | None:
    spec = spec.removeprefix("likelihood:")
    return None if spec in ("none", "logprob") else resolve_folder(spec, role)


# --- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A candidate of best-of-n. ended: it was not cut off. right: its answer is correct."""

    answer: str | None
    score: float | None
    ended: bool
    right: bool
    tokens: int


def samples_of(record: Record, checker: AnswerChecker) -> list[Sample]:
    """Return the judged candidates of a problem in lineage order."""
    verdicts = checker.judge(record.gold, [each["answer"] for each in record.candidates])
    found = []
    for each in record.candidates:
        answer, ended = each["answer"], each["stop"] in COMPLETE_STOPS
        right = ended and bool(verdicts[answer])
        found.append(Sample(answer, each["score"], ended, right, each["tokens"]))
    return found or [Sample(None, None, False, False, 0)]  # a problem that failed


def is_choice_right(samples: Sequence[Sample], how: AnswerChoice) -> float:
    """Return 1 if the answer that `how` chooses from the samples is right, else 0."""
    answers = [each.answer for each in samples]
    scores = [each.score for each in samples]
    index = choose(answers, scores, [each.ended for each in samples], how)
    return float(samples[index].right)


def rows_of(
    config: Evaluated, records: Sequence[Record], checker: AnswerChecker, sizes: Sequence[int]
) -> Iterator[AccuracyRow]:
    """Yield the table rows of a run. A best-of-n run gives those of all smaller n, too."""
    if config.method != "best-of-n":
        spent = float(np.mean([record.tokens.get("generated") or 0 for record in records]))
        for name, how in (("", "best"), (", weighted vote", "weighted")):
            right = [float(bool(r.choices.get(how, {}).get("correct"))) for r in records]
            if config.n > 1 or how == "best":
                yield AccuracyRow(config.generator, config.method + name, config.n, right, spent)
        return
    judged = [samples_of(record, checker) for record in records]
    shares = [float(np.mean([each.right for each in samples])) for samples in judged]
    length = float(np.mean([each.tokens for samples in judged for each in samples]))
    yield AccuracyRow(config.generator, "one sample", 1, shares, length, config.n)
    for n in sizes:
        some = [samples[:n] for samples in judged]
        spent = float(np.mean([sum(each.tokens for each in samples) for samples in some]))
        rights = {
            name: [is_choice_right(each, how) for each in some] for name, how in _VOTES.items()
        }
        rights["any of n right"] = [float(any(s.right for s in samples)) for samples in some]
        for method, right in rights.items():
            yield AccuracyRow(config.generator, method, n, right, spent)


def differences(rows: Sequence[AccuracyRow]) -> Iterator[dict[str, Any]]:
    """Yield differences in accuracy between two rows, with intervals by resampling problems."""
    known = {(row.generator, row.method, row.n): row for row in rows}
    for row in rows:
        if row.method.partition(",")[0] not in ("beam", "dynamic"):
            continue
        others = [(row.generator, method, row.n) for method in (*_VOTES, "beam")]
        others += [("strong", method, 1) for method in ("one sample", "greedy")]
        others += [("weak", "beam", row.n)] if row.generator == "strong" else []
        for other in others:
            against = known.get(other)
            if against is None or against is row:
                continue
            each = [a - b for a, b in zip(row.right, against.right, strict=True)]
            found = estimate_mean(each)
            assert found is not None
            low, high = found["interval"]
            yield {
                "this": _named(row),
                "less": _named(against),
                "difference": f"{found['value']:+.3f}",
                "95 % interval": f"{low:+.3f} to {high:+.3f}",
                "right, wrong": f"{sum(d > 0 for d in each)}, {sum(d < 0 for d in each)}",
            }


def _named(row: AccuracyRow) -> str:
    return f"{row.generator}, {row.method}" + (f", n = {row.n}" if row.n > 1 else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, help="number of problems (default: all)")
    parser.add_argument("--n", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--strong-n", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--methods", nargs="*", default=["beam"], help="beam and/or dynamic")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--strong", default="bundled:strong", help="a second generator, or none")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--in-flight", type=int, help="problems in flight (default: auto)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rows: list[AccuracyRow] = []
    exact = True
    with AnswerChecker() as checker:
        for config in list_runs(args):
            say(f"{config.generator}, {config.method}, n={config.n}")
            records = run_config(config, args, checker)
            sizes = args.n if config.generator == "weak" else args.strong_n
            rows += rows_of(config, records, checker, sizes)
            exact = exact and all(record.exact for record in records)
    rows.sort(key=lambda row: (row.generator == "strong", row.n))
    paired = list(differences(rows))
    print(table([row.to_json() for row in rows], _COLUMNS))
    print(table(paired, list(paired[0]) if paired else []))
    num = len(rows[0].right)
    names = ("dataset", "width", "seed", "temperature", "model", "strong", "verifier")
    settings = {name: getattr(args, name) for name in names}
    lines = [row.to_json() for row in rows]
    finish(
        "accuracy", {**settings, "problems": num, "exact": exact, "rows": lines, "paired": paired}
    )


if __name__ == "__main__":
    main()
