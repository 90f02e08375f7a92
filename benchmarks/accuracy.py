"""Accuracy against n: one sample, majority, best-of-n, weighted vote, beam search.

Every configuration is an `eval` run of its own under `results/accuracy/`, so a run that is
stopped goes on where it was. Prints the table of the README and draws it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamwright import Settings, Solver
from beamwright.evaluate import AnswerChecker, Record, RunOptions, load_problems, run
from beamwright.models.load import resolve_folder
from common import RESULTS, fingerprint, finish, say, table

_RESAMPLES = 4000
_COLUMNS = ("method", "n", "accuracy", "95 % interval", "tokens / problem", "s / problem")


@dataclass(frozen=True)
class Config:
    """One search. name: of its folder and of its rows in the table."""

    name: str
    n: int
    options: dict[str, Any]


def configurations(args: argparse.Namespace) -> list[Config]:
    found = [Config("best-of-n", 1, {"search": "best-of-n"})]
    for n in args.n:
        found.append(Config("best-of-n", n, {"search": "best-of-n"}))
        found.append(Config("beam", n, {"search": "beam", "width": args.width}))
        if args.likelihood:
            beam = {"search": "beam", "width": args.width, "verifier": args.likelihood}
            found.append(Config("beam, likelihood", n, beam))
    if args.backbone != "none":
        folder = resolve_folder("bundled", "verifier") if args.backbone == "bundled" else None
        options = {"model": str(folder or args.backbone), "verifier": "none"}
        found.append(Config("backbone", 1, {"search": "best-of-n", **options}))
        if args.backbone_n:
            options["verifier"] = args.verifier
            beam = {"search": "beam", "width": args.width, **options}
            found += [Config("beam on the backbone", n, beam) for n in args.backbone_n]
    return found


def records_of(config: Config, args: argparse.Namespace, checker: AnswerChecker) -> list[Record]:
    """Solve, or read what was solved before."""
    options = {"model": args.model, "verifier": args.verifier, **config.options}
    settings = Settings.build(n=config.n, seed=args.seed, temperature=args.temperature, **options)
    folders = [_folder(options["model"], "generator"), _folder(options["verifier"], "verifier")]
    models = "-".join(fingerprint(folder) for folder in folders if folder is not None)
    name = config.name.replace(", ", "-").replace(" ", "-")
    dataset = args.dataset.replace("/", "_").replace(":", "_")
    out = RESULTS / "accuracy" / f"{name}-{config.n}-{dataset}-seed{args.seed}-{models}"
    problems = load_problems(args.dataset, args.limit)
    records: dict[str, Record] = {}

    def keep(record: Record, done: int, total: int) -> None:
        records[record.unique_id] = record
        if done % 25 == 0 or done == total:
            right = sum(bool(each.correct) for each in records.values())
            say(f"  {config.name}, n={config.n}: {done}/{total}, {right / done:.3f} so far")

    solver: list[Solver] = []

    def solve_many(batch: Any) -> Any:
        if not solver:  # a finished run needs no models
            solver.append(Solver(settings))
        return solver[0].solve_many(batch)

    run(problems, solve_many, settings, RunOptions(out, args.in_flight, keep), checker)
    return [records[problem.unique_id] for problem in problems.problems]


def _folder(spec: str, role: str) -> Path | None:
    spec = spec.removeprefix("likelihood:")
    return None if spec in ("none", "logprob") else resolve_folder(spec, role)


# --- rows ------------------------------------------------------------------------------------


def row(method: str, n: int, records: Sequence[Record], right: Sequence[float]) -> dict[str, Any]:
    values = np.asarray(right, dtype=float)
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    tokens = sum(r.tokens.get("generated") or 0 for r in records) / len(records)
    seconds = sum(r.time.get("total_s") or 0.0 for r in records) / len(records)
    return {
        "method": method,
        "n": n,
        "accuracy": round(float(values.mean()), 4),
        "95 % interval": f"{low:.3f} - {high:.3f}",
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "tokens / problem": round(tokens),
        "s / problem": round(seconds, 3),
    }


def rows_of(config: Config, records: list[Record], checker: AnswerChecker) -> list[dict[str, Any]]:
    def chosen(how: str) -> list[float]:
        return [float(bool(r.choices.get(how, {}).get("correct"))) for r in records]

    if config.name == "backbone":
        return [row("verifier's backbone, one sample", 1, records, chosen("best"))]
    if config.name != "best-of-n":
        return [row(config.name, config.n, records, chosen("best"))]
    if config.n == 1:
        return [row("one sample", 1, records, chosen("best"))]
    right = [_each_right(record, checker) for record in records]
    return [
        row("mean of n samples", config.n, records, [float(np.mean(r)) for r in right]),
        row("majority", config.n, records, chosen("majority")),
        row("weighted vote", config.n, records, chosen("weighted")),
        row("best-of-n", config.n, records, chosen("best")),
        row("any of n right", config.n, records, [float(any(r)) for r in right]),
    ]


def _each_right(record: Record, checker: AnswerChecker) -> list[bool]:
    if not record.candidates:
        return [False]
    return [
        c["stop"] == "eos" and bool(checker.is_correct(record.gold, c["answer"]))
        for c in record.candidates
    ]


def smaller_runs_are_prefixes(runs: dict[tuple[str, int], list[Record]]) -> bool | None:
    """Lineage keys the random stream: are the first candidates of a larger run the smaller run's?

    None where there is nothing to compare.
    """
    samples = {n: records for (name, n), records in runs.items() if name == "best-of-n"}
    if len(samples) < 2:
        return None
    largest = samples[max(samples)]
    same = True
    for n, records in samples.items():
        for small, large in zip(records, largest, strict=True):
            left = [(c["answer"], c["stop"], c["tokens"]) for c in small.candidates]
            right = [(c["answer"], c["stop"], c["tokens"]) for c in large.candidates]
            cut = any(stop == "round_limit" for _, stop, _ in left + right)
            same = same and (cut or left == right[:n])
    return same


# --- plot ------------------------------------------------------------------------------------


def plot(rows: list[dict[str, Any]], title: str, file: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        say("no plot: install the extra 'plot'")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    lines = {row["method"] for row in rows if row["n"] > 1} - {"mean of n samples"}
    for method in sorted(lines):
        points = [row for row in rows if row["method"] == method]
        x = [point["n"] for point in points]
        dashed = "--" if method == "any of n right" else "-"
        axes.plot(x, [p["accuracy"] for p in points], dashed, marker="o", label=method)
        axes.fill_between(x, [p["low"] for p in points], [p["high"] for p in points], alpha=0.12)
    for method, style in (("one sample", ":"), ("verifier's backbone, one sample", "-.")):
        for point in (row for row in rows if row["method"] == method):
            axes.axhline(point["accuracy"], linestyle=style, color="gray", label=method)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["n"] for row in rows if row["n"] > 1})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("n, candidates")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    say(f"written: {file}")
    return True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="bundled:test")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--n", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--verifier", default="bundled")
    parser.add_argument("--likelihood", help="add beam rows under it, e.g. likelihood:bundled")
    parser.add_argument("--backbone", default="bundled", help="folder, 'bundled' or 'none'")
    parser.add_argument(
        "--backbone-n", type=int, nargs="*", default=[], help="also search with the backbone"
    )
    parser.add_argument("--in-flight", type=int, help="problems solved together")
    parser.add_argument("--plot", type=Path, default=RESULTS / "accuracy.png")
    return parser.parse_args()


def main() -> None:
    args = parse()
    runs: dict[tuple[str, int], list[Record]] = {}
    rows: list[dict[str, Any]] = []
    with AnswerChecker() as checker:
        for config in configurations(args):
            say(f"{config.name}, n={config.n}")
            runs[config.name, config.n] = records = records_of(config, args, checker)
            rows += rows_of(config, records, checker)
    rows.sort(key=lambda row: (row["n"], row["method"]))
    print(table(rows, _COLUMNS))
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    num = len(next(iter(runs.values())))
    plot(rows, f"{args.dataset}, {num} problems, T = {args.temperature}", args.plot)
    finish(
        "accuracy",
        {
            "dataset": args.dataset,
            "problems": num,
            "width": args.width,
            "seed": args.seed,
            "temperature": args.temperature,
            "model": args.model,
            "verifier": args.verifier,
            "exact": all(r.exact for records in runs.values() for r in records),
            "smaller_runs_are_prefixes": smaller_runs_are_prefixes(runs),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
