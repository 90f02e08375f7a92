"""Stage `roofline`: decode steps against the memory-bandwidth ceiling, and the host's share.

Bytes of a step: weights used for every token, and the KV that its rows see, shared parts counted
once. Ceiling: the faster of a device copy and a product with few rows, measured in this process.
The host's share is the part of a step in which the device is idle. Each shape and batch runs by
default; the first shape also runs with `--deterministic`, and its first batch without graphs.
`exact` is the result of the start-up test.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from beamwright import Solver
from beamwright.models.named import shape_from_text
from beamwright.protocols import RoundReport
from beamwright_lab.common import matmul_parameters
from beamwright_lab.gpu.context import Context, release
from beamwright_lab.gpu.link import SMOKE, Sizes, copy_bandwidth, weights_bandwidth

_LAST_S = 8.0  # to load a 7B model and run a few steps
_TINY = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=512"


@dataclass(frozen=True)
class Steps:
    """What to measure.

    rounds: each of `step_tokens` tokens; the first is a warm-up. hosts: shapes and batches whose
    host share is measured; the first has a goal.
    """

    shapes: tuple[str, ...] = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-0.5b")
    batches: tuple[int, ...] = (16, 64, 256, 1)
    hosts: tuple[tuple[str, int], ...] = (("qwen2.5-7b", 16), ("qwen2.5-1.5b", 64))
    prompt: int = 128
    step_tokens: int = 32
    rounds: int = 5


_SMOKE_CASE = Steps((_TINY,), (2, 1), ((_TINY, 4),), 16, 4, 3)


def run(context: Context) -> dict[str, Any]:
    """Measure decode steps and host shares, with the ceiling before and after."""
    case = _SMOKE_CASE if context.smoke else Steps()
    sizes = SMOKE if context.smoke else Sizes(repeats=4)
    data: dict[str, Any] = {"ceiling": _ceiling(context, sizes), "steps": [], "not_run": []}

    def step(what: dict[str, Any]) -> dict[str, Any]:
        row = step_row(context, case, **what)
        return {**row, "share_of_ceiling": round(row["bytes_per_s"] / data["ceiling"], 4)}

    work = [(what, partial(step, what)) for what in ways(case)]
    context.rows(data, "steps", work, least_s=3.0)
    # The profiler records every launch: few steps are enough.
    few = replace(case, rounds=3, step_tokens=min(16, case.step_tokens))
    hosts = [{"model": model, "batch": batch} for model, batch in case.hosts]
    data["hosts"] = []
    work = [(what, partial(host_share, context, few, **what)) for what in hosts]
    context.rows(data, "hosts", work, least_s=_LAST_S)
    data["ceiling_after"] = _ceiling(context, sizes)
    return data


def ways(case: Steps) -> list[dict[str, Any]]:
    """List the decode steps to measure, most important first."""
    usual: dict[str, Any] = {"graphs": "auto", "deterministic": False}
    every = product(case.shapes, case.batches)
    found = [{"model": model, "batch": batch, **usual} for model, batch in every]
    first = found[: len(case.batches)]
    others = [{**way, "deterministic": True} for way in first]
    return [*first, *others, {**first[0], "graphs": "off"}, *found[len(first) :]]


def _ceiling(context: Context, sizes: Sizes) -> float:
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    found = max(
        copy_bandwidth(context.device, sizes), weights_bandwidth(context.device, sizes, dtype)
    )
    release(context.device)
    return found


def plain_paths(
    context: Context,
    case: Steps,
    shape: str,
    batch: int,
    graphs: str = "auto",
    *,
    deterministic: bool = False,
) -> Solver:
    """Build a solver of independent paths after one prompt, with all KV on the device."""
    tokens = case.rounds * case.step_tokens
    return Solver(
        model=f"random:{shape}",
        verifier="none",
        device=context.device,
        search="best-of-n",
        n=batch,
        width=1,
        max_rounds=case.rounds,
        step_tokens=case.step_tokens,
        max_tokens=tokens,
        ignore_eos=True,
        schedule="in-gpu",
        deterministic=deterministic,
        graphs=graphs,
        kv_memory=str(_kv_bytes(context, shape, batch, case.prompt + tokens)),
    )


def _kv_bytes(context: Context, shape: str, batch: int, path_tokens: int) -> int:
    element_bytes = 2 if context.on_gpu else 4
    return 2 * batch * (path_tokens + 64) * shape_from_text(shape).kv_bytes_per_token(element_bytes)


def round_seconds(solver: Solver, prompt: int) -> list[float]:
    ends = [0.0]

    def on_round(report: RoundReport) -> None:
        ends.append(report.elapsed_s)

    solver.synthetic(prompt, on_round=on_round)
    return [end - start for start, end in pairwise(ends)]


def step_row(
    context: Context, case: Steps, model: str, batch: int, graphs: str, *, deterministic: bool
) -> dict[str, Any]:
    """Measure milliseconds, bytes and tokens per second of a decode step."""
    with plain_paths(context, case, model, batch, graphs, deterministic=deterministic) as solver:
        warnings = solver.synthetic(case.prompt).warnings
        rounds = round_seconds(solver, case.prompt)[1:]
        decoder = solver.generator.decoder
        step_s = statistics.median(rounds) / case.step_tokens
        weight_bytes = matmul_parameters(decoder.shape) * decoder.dtype.itemsize
        token_bytes = decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
        exact = solver.exact
    # Rows share the prompt, and have half of their own tokens on average.
    own = batch * case.step_tokens * (1 + case.rounds) / 2
    num_bytes = weight_bytes + token_bytes * (case.prompt + own)
    return {
        "step_ms": round(1e3 * step_s, 4),
        "bytes": round(num_bytes),
        "bytes_per_s": num_bytes / step_s,
        "tokens_per_s": round(batch / step_s, 1),
        "exact": exact,
        "warnings": list(warnings),
    }


def host_share(context: Context, case: Steps, model: str, batch: int) -> dict[str, Any]:
    """Measure the share of a search's time in which the device is idle.

    On a CPU, operators' own time counts as the device's.
    """
    kinds = [ProfilerActivity.CUDA] if context.on_gpu else [ProfilerActivity.CPU]
    with plain_paths(context, case, model, batch) as solver:
        round_seconds(solver, case.prompt)
        plain_s = sum(round_seconds(solver, case.prompt)[1:])
        with profile(activities=kinds) as profiler:
            rounds = round_seconds(solver, case.prompt)
    on_device = "self_device_time_total" if context.on_gpu else "self_cpu_time_total"
    busy_s = sum(getattr(event, on_device) for event in profiler.key_averages()) / 1e6
    # Both sums include the first round, which has the prefill.
    busy_share = busy_s / sum(rounds)
    steps = (case.rounds - 1) * case.step_tokens
    return {
        "step_ms": round(1e3 * plain_s / steps, 4),
        "step_ms_profiled": round(1e3 * sum(rounds[1:]) / steps, 4),
        "device_busy_share_profiled": round(busy_share, 4),
        "host_gap_share": round(max(0.0, 1 - busy_s / sum(rounds)), 4),
        # The profiler slows down the host, not the kernels.
        "host_gap_share_unprofiled": round(max(0.0, 1 - busy_share * sum(rounds[1:]) / plain_s), 4),
    }
