"""KV in 8 bits beside full precision: bytes, sameness of trees, divergence, accuracy.

Parts, each by itself (`--parts`): bytes of a search on the device, the host and the link; trees
over schedules, budgets, batching and a resume, which must be equal; the mean KL divergence of the
next token's distribution from that with KV in full precision, along paths that a search wrote; and
accuracy on all test problems, in pairs. Accuracy runs are kept and go on where they were.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beamwright import Solution, Solver
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import estimate_mean
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.models.prefill import PrefillRequest
from beamwright_lab.accuracy import Evaluated, run_of
from beamwright_lab.common import finish, say, table

MODELS = {"weak": "bundled", "strong": "bundled:strong"}
_SEARCH: Mapping[str, Any] = {"n": 16, "width": 4, "verifier": "bundled"}


def _solved(problems: Sequence[Problem], options: Mapping[str, Any]) -> list[Solution]:
    with Solver(**{**_SEARCH, **options}) as solver:
        return [solver.solve(each.problem, problem_id=each.unique_id) for each in problems]


def _bytes(found: Sequence[Solution]) -> dict[str, int]:
    """Of all problems: the largest peaks, and what crossed the link."""
    return {
        "device_peak_bytes": max(each.kv.device_peak_bytes or 0 for each in found),
        "host_peak_bytes": max(each.kv.host_peak_bytes or 0 for each in found),
        "link_bytes": sum((e.kv.h2d_bytes or 0) + (e.kv.d2h_bytes or 0) for e in found),
    }


def bytes_and_trees(
    problems: Sequence[Problem], dtype: str, kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A line per precision of KV: bytes with all on the device, and with a quarter of the room; and
    how many trees are equal to those of a search alone with room, in every variant."""
    for model, kind in product(MODELS, kinds):
        options = {"model": MODELS[model], "dtype": dtype, "kv_dtype": kind}
        alone = _solved(problems, {**options, "schedule": "in-gpu"})
        peak = _bytes(alone)["device_peak_bytes"]
        tight = {"schedule": "locality", "kv_memory": peak // 4}
        variants: dict[str, Mapping[str, Any]] = {
            "locality": {"schedule": "locality"},
            "quarter": tight,
            "quarter, continuous": {**tight, "batching": "continuous", "max_batch": 5},
            "half, grouped": {**tight, "kv_memory": peak // 2, "batching": "grouped"},
        }
        found = {name: _solved(problems, {**options, **more}) for name, more in variants.items()}
        found["resumed"] = _resumed(problems, options)
        equal = {
            name: sum(a.tree_hash == b.tree_hash for a, b in zip(alone, trees, strict=True))
            for name, trees in found.items()
        }
        tight_bytes = {f"quarter_{name}": value for name, value in _bytes(found["quarter"]).items()}
        line = {"generator": model, "dtype": dtype, "kv": kind, "device_peak_bytes": peak}
        yield {**line, **tight_bytes, "trees": len(problems), "equal": equal}
        say(f"  {model} {dtype} {kind}: {equal}")


def _resumed(problems: Sequence[Problem], options: Mapping[str, Any]) -> list[Solution]:
    """Gone on with, in another process's place, after the second round."""
    with tempfile.TemporaryDirectory() as folder:
        file, early = Path(folder) / "now.json", Path(folder) / "early.json"
        found = []
        for each in problems:
            early.unlink(missing_ok=True)

            def keep(report: Any) -> None:
                if report.tree.rounds <= 2 or not early.exists():
                    early.write_bytes(file.read_bytes())

            with Solver(**{**_SEARCH, **options, "schedule": "in-gpu"}) as solver:
                key = each.unique_id
                solver.solve(each.problem, problem_id=key, checkpoint=file, on_round=keep)
            with Solver(**{**_SEARCH, **options, "schedule": "in-gpu"}) as solver:
                found.append(solver.resume(early))
        return found


# --- divergence ------------------------------------------------------------------------------


@torch.inference_mode()
def divergence(
    problems: Sequence[Problem], dtype: str, kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Mean KL over the tokens of the best path of each problem, as full precision wrote it."""
    for model, name in MODELS.items():
        options = {"model": name, "dtype": dtype, "schedule": "in-gpu"}
        solved = _solved(problems, options)
        paths = [each.tree.node(each.lineage).path_token_ids() for each in solved]
        logs = {kind: _log_probabilities(paths, {**options, "kv_dtype": kind}) for kind in kinds}
        for kind in kinds[1:]:
            kl, same = [], []
            for full, kept in zip(logs["auto"], logs[kind], strict=True):
                kl += (full.exp() * (full - kept)).sum(-1).tolist()
                same += (full.argmax(-1) == kept.argmax(-1)).float().tolist()
            yield {
                "generator": model,
                "dtype": dtype,
                "kv": kind,
                "tokens": len(kl),
                "mean_kl": float(np.mean(kl)),
                "p99_kl": float(np.quantile(kl, 0.99)),
                "same_argmax": float(np.mean(same)),
            }


def _log_probabilities(
    paths: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Of the next token behind every token of each path [tokens, vocab]."""
    with Solver(**{**_SEARCH, **options}) as solver:
        model, found = solver.generator, []
        for path in paths:
            segment = model.store.create()
            (hidden,) = model.prefill([PrefillRequest((), segment, path, 0)])
            found.append(model.decoder.logits(hidden).double().log_softmax(-1))
            model.store.free(segment)
        return found


# --- accuracy --------------------------------------------------------------------------------


def accuracy(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Right answers of greedy decoding and of beam search, with the paired difference."""
    with AnswerChecker() as checker:
        for model, (method, n) in product(MODELS, (("greedy", 1), ("beam", args.n))):
            rights: dict[str, list[float]] = {}
            for kind in args.kinds:
                how = {"search": method, "width": 4}
                if method == "greedy":
                    how = {"search": "best-of-n", "temperature": 0.0, "verifier": "none"}
                options = {"model": MODELS[model], "kv_dtype": kind, **how}
                records = run_of(Evaluated(model, method, n, options), args, checker)
                rights[kind] = [float(bool(each.correct)) for each in records]
                less = [a - b for a, b in zip(rights[kind], rights["auto"], strict=True)]
                mean = estimate_mean(less)
                yield {
                    "generator": model,
                    "method": method,
                    "n": n,
                    "kv": kind,
                    "problems": len(less),
                    "accuracy": float(np.mean(rights[kind])),
                    "difference": float(np.mean(less)),
                    "interval": mean and mean["interval"],
                    "right_wrong": [sum(d > 0 for d in less), sum(d < 0 for d in less)],
                }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="*", default=["trees", "kl", "accuracy"])
    parser.add_argument("--kinds", nargs="*", default=["auto", "int8", "fp8"], help="auto first")
    parser.add_argument("--problems", type=int, default=20, help="of trees and divergence")
    parser.add_argument("--dtype", default="float32", help="of trees and divergence")
    parser.add_argument("--n", type=int, default=4, help="of the beam search for accuracy")
    parser.add_argument("--limit", type=int, help="problems for accuracy; default: all")
    parser.add_argument("--in-flight", type=int, default=64)
    shared = {"dataset": "bundled:test", "seed": 0, "temperature": 0.8, "verifier": "bundled"}
    parser.set_defaults(**shared)
    return parser.parse_args()


def main() -> None:
    args = parse()
    problems = load_problems(args.dataset, args.problems).problems
    found: dict[str, list[dict[str, Any]]] = {}
    if "trees" in args.parts:
        found["trees"] = list(bytes_and_trees(problems, args.dtype, args.kinds))
    if "kl" in args.parts:
        found["kl"] = list(divergence(problems, args.dtype, args.kinds))
    if "accuracy" in args.parts:
        found["accuracy"] = list(accuracy(args))
    for lines in found.values():
        print(table(lines, list(lines[0])))
    named = "-".join(sorted(found))
    finish(f"kv_bits-{named}-{args.dtype}", found)


if __name__ == "__main__":
    main()
