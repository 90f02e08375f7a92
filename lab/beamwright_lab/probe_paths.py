"""A head in the generator beside the bundled reward model, on the same finished paths.

Of a run of `eval --paths` that the head was trained on, the problems that its training left for the
report: best of n and weighted vote by head, reward model, confidence, and a plain vote, over the
same samples; differences in pairs; CPU seconds and tokens of both verifiers. `probe.py` runs whole
searches, which takes an hour.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beamwright import Solver
from beamwright.cli.probe import _paths_of
from beamwright.evaluate.metrics import Record, estimate_mean
from beamwright.evaluate.run import parse_records
from beamwright.io import read_file
from beamwright.search.choose import Choice, choose
from beamwright.tree import COMPLETE_STOPS
from beamwright.verify.probe import ProbeVerifier
from beamwright.verify.probe_fit import FinishedPath, _part, _rows
from beamwright_lab.common import finish, table

_REPORTED = 2
_HOW: Mapping[str, Choice] = {"best-of-n": "best", "weighted vote": "weighted", "vote": "majority"}
_COLUMNS = ("scored by", "method", "n", "right", "less reward model", "95 %")


def rights(
    record: Record, scores: Sequence[float | None], sizes: Sequence[int]
) -> dict[tuple[str, int], float]:
    """By method and n, whether the chosen answer is right."""
    found = {}
    for n in sizes:
        some = record.candidates[:n]
        complete = [each["stop"] in COMPLETE_STOPS for each in some]
        votes = [each["vote"] for each in some]
        for method, how in _HOW.items():
            chosen = some[choose(votes, scores[:n], complete, how)]
            found[method, n] = float(bool(chosen["correct"]))
    return found


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Every scorer's lines, and what the two verifiers have cost."""
    records, _ = parse_records(args.run, read_file(args.run / "results.jsonl"))
    kept = [r for r in records.values() if r.prompt_ids and _part(r.problem) == _REPORTED]
    kept = kept[: args.limit]
    by_problem = dict[str, list[FinishedPath]]()
    for path in _paths_of(args.run):
        by_problem.setdefault(path.problem, []).append(path)
    right: dict[str, list[dict[tuple[str, int], float]]] = {}
    cpu_s, tokens = {"reward model": 0.0, "head": 0.0}, {"reward model": 0, "head": 0}
    with Solver(model=args.model, verifier="bundled") as solver, torch.inference_mode():
        assert solver.generator is not None
        reader = solver._machinery.reader
        head = ProbeVerifier(args.head, reader, args.model)  # type: ignore[arg-type]
        for record in kept:
            paths = by_problem[record.problem]
            texts = [_steps(solver, each["steps"]) for each in record.candidates]
            began = time.process_time()
            read = solver.score_many(record.problem, texts, delimiter="")
            cpu_s["reward model"] += time.process_time() - began
            with solver.threads.in_use():
                rows = _rows(solver.generator, paths)
                began = time.process_time()
                found = [head._logs(part)[0] for part in torch.cat(rows).split(32)]
                cpu_s["head"] += time.process_time() - began
            logs = torch.cat(found).split([len(each) for each in rows])
            tokens["head"] += sum(map(len, rows))
            tokens["reward model"] += sum(len(part) for part in rows)
            scored: dict[str, list[float | None]] = {
                "reward model": [each.score for each in read],
                "head": [float(each.sum().exp()) for each in logs],
                "confidence": [float(each[:, -1].mean().exp()) for each in rows],
            }
            for name, scores in scored.items():
                right.setdefault(name, []).append(rights(record, scores, args.n))
    lines = []
    for name, each in right.items():
        for method, n in each[0]:
            if method == "vote" and name != "head":
                continue
            own = [found[method, n] for found in each]
            other = "weighted vote" if method == "vote" else method
            base = [found[other, n] for found in right["reward model"]]
            less = estimate_mean([a - b for a, b in zip(own, base, strict=True)])
            low, high = less["interval"] if less else (0.0, 0.0)
            lines.append(
                {
                    "scored by": "nobody" if method == "vote" else name,
                    "method": method,
                    "n": n,
                    "right": f"{np.mean(own):.3f}",
                    "less reward model": f"{less['value'] if less else 0.0:+.3f}",
                    "95 %": f"{low:+.3f} to {high:+.3f}",
                }
            )
    spent = {name: round(value, 2) for name, value in cpu_s.items()}
    return {"problems": len(kept), "rows": lines, "cpu_s": spent, "tokens": tokens}


def _steps(solver: Solver, steps: Sequence[Sequence[int]]) -> list[str]:
    """Texts of a path's steps; without that of the end's token."""
    assert solver.codec is not None
    texts, before, ids = list[str](), "", list[int]()
    for step in steps:
        ids += step
        text = solver.codec.decode(ids)
        texts.append(text[len(before) :])
        before = text
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of `eval --out` with --paths")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--n", type=int, nargs="*", default=[4, 16])
    args = parser.parse_args()
    result = compared(args)
    print(table(result["rows"], _COLUMNS))
    finish("probe_paths", {"model": args.model, **result})


if __name__ == "__main__":
    main()
