"""Search methods side by side: accuracy, tokens, seconds, goodput, and paired differences.

    beamwright eval --recipe recipes/bundled_methods.yaml --limit 200 --out results/methods
    python benchmarks/methods_table.py results/methods

Reads folders of `eval --out`. Differences are between two methods at the same n on the same
problems: problems are resampled in pairs, so the intervals are narrower than those of the rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamwright.evaluate.estimates import estimate_mean

_CHOICE = "best"


@dataclass(frozen=True)
class Run:
    """One setting: its strategy, n, and a record per judged problem, by problem."""

    method: str
    n: int
    records: Mapping[str, Mapping[str, Any]]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run below these folders, by n and then by name."""
    return sorted(_read(folders), key=lambda run: (run.n, run.method))


def _read(folders: Sequence[Path]) -> Iterator[Run]:
    for file in sorted({f for folder in folders for f in folder.rglob("results.jsonl")}):
        settings = json.loads((file.parent / "settings.json").read_text())
        search = settings.get("settings", settings)["search"]
        lines = [json.loads(line) for line in file.read_text().splitlines() if line]
        judged = {line["unique_id"]: line for line in lines if line["correct"] is not None}
        yield Run(search["search"], search["n"], judged)


def accuracy(run: Run) -> list[float]:
    """One or zero per problem, in the order of the problems."""
    return [float(run.records[key]["correct"]) for key in sorted(run.records)]


def difference(left: Run, right: Run) -> tuple[float, float, float]:
    """Accuracy of `left` less that of `right`, and its 95 % interval over resampled problems."""
    shared = sorted(left.records.keys() & right.records.keys())
    each = [float(left.records[k]["correct"]) - float(right.records[k]["correct"]) for k in shared]
    found = estimate_mean(each)
    if found is None:
        return (float("nan"),) * 3
    return (found["value"], *found["interval"])


def row(run: Run) -> dict[str, Any]:
    """What the table says of a run."""
    records = list(run.records.values())
    tokens = [record["tokens"]["generated"] for record in records]
    seconds = [record["time"]["total_s"] for record in records]
    goodput = [r["goodput_tok_s"] for r in records if r.get("goodput_tok_s")]
    return {
        "method": run.method,
        "n": run.n,
        "problems": len(records),
        "accuracy": estimate_mean(accuracy(run)),
        "tokens": float(np.mean(tokens)),
        "seconds_median": float(np.median(seconds)),
        "goodput_tok_s": float(np.mean(goodput)) if goodput else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--against", default="beam", help="method of the paired differences")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = read_runs(options.folders)
    base = {run.n: run for run in runs if run.method == options.against}
    rows = []
    for run in runs:
        found = row(run)
        if run.n in base and run is not base[run.n]:
            found[f"less_{options.against}"] = difference(run, base[run.n])
        rows.append(found)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"| n | method | problems | accuracy | less {options.against} | tokens | s | goodput |")
    print("|---|---|---|---|---|---|---|---|")
    for found in rows:
        print(_line(found, f"less_{options.against}"))


def _line(found: Mapping[str, Any], less: str) -> str:
    low, high = found["accuracy"]["interval"]
    paired = "" if less not in found else "{:+.3f} ({:+.3f} to {:+.3f})".format(*found[less])
    goodput = "" if found["goodput_tok_s"] is None else f"{found['goodput_tok_s']:.1f}"
    return (
        f"| {found['n']} | {found['method']} | {found['problems']} "
        f"| {found['accuracy']['value']:.3f} ({low:.2f}-{high:.2f}) | {paired} "
        f"| {found['tokens']:,.0f} | {found['seconds_median']:.2f} | {goodput} |"
    )


if __name__ == "__main__":
    main()
