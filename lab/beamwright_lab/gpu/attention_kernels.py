"""Stage `kernels`: time attention kernels against the floor set by their bytes or FLOPs.

A decode step must read every distinct KV token once, the rows' tails (KV newer than the last full
block), and queries and contexts; these bytes over the measured copy bandwidth are the floor. A
prefill's floor is its FLOPs over the measured matrix-product rate, if that is longer. Each
measurement replays a CUDA graph of several layers in sequence, after a write larger than the L2
cache: code is warm and KV is cold, as in a real step. Times are microseconds per layer; `eager` is
the same launched from Python. The torch backend runs beside it on the same tensors.

Also timed: sampling from 64 rows of 151,936 logits, by torch's operations and by one kernel, whose
floor is reading the logits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from beamwright.attention import make_attention
from beamwright.attention.kernels import why_no_kernels
from beamwright.engine.noise import lineage_key, stack_keys
from beamwright.engine.sampling import RowSampling, Sampler
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.segments import Path, PathPart
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import RowTails
from beamwright.sections import SamplingSettings
from beamwright_lab.common import say
from beamwright_lab.gpu.context import Context, one_line, release

HEADS = {  # kv_heads, group, head_dim; most important first, as time may run out
    "qwen2.5-1.5b": (2, 6, 128),
    "opt-6.7b": (32, 1, 128),
    "qwen2.5-7b": (4, 7, 128),
    "llama-3.1-8b": (8, 4, 128),
}
_REPEATS, _LEAST_S, _LAYERS = 30, 2.0, 4
_DRAW = (64, 151_936)  # rows, tokens
_DRAWS = {
    "draw": SamplingSettings(),
    "draw of top-k and top-p": SamplingSettings(top_k=20, top_p=0.95),
    "draw of top-p, flat": SamplingSettings(top_p=0.95),
}
_COPY_BYTES = 2**30
_MATRIX = 8192


@dataclass(frozen=True)
class AttentionCase:
    """A case of attention to time.

    layout: `tree` (a trunk, then a fan of `width` children per level), `shared` (one prefix) or
    `separate` (nothing shared). length: tokens of each path. step: tokens of a segment. tail:
    tokens per row newer than its segments. chunk: new tokens per row; None means a decode step.
    """

    name: str
    model: str
    layout: str
    rows: int
    length: int
    step: int = 32
    tail: int = 16
    width: int = 4
    chunk: int | None = None

    @property
    def per_beam(self) -> bool:
        return self.layout == "separate"


def cases() -> list[AttentionCase]:
    found = []
    for model in HEADS:
        found += [
            AttentionCase("decode, tree", model, "tree", 64, 2048),
            AttentionCase("decode, tree", model, "tree", 16, 1024),
            AttentionCase(
                "decode, tree of long steps", model, "tree", 64, 2048, step=256, tail=128
            ),
            AttentionCase("decode, one prefix", model, "shared", 64, 1024, step=1024),
            AttentionCase("decode, one row", model, "shared", 1, 2048, step=2048),
            AttentionCase("decode, KV copied per path", model, "separate", 16, 2048),
            AttentionCase("prefill of a prompt", model, "shared", 1, 0, chunk=256),
            AttentionCase("prefill that continues a path", model, "tree", 16, 1024, chunk=64),
        ]
    return found


@dataclass
class Kernels:
    """A case's KV segments in a store, and the inputs of one step."""

    case: AttentionCase
    store: SegmentStore
    paths: list[Path]
    query: torch.Tensor
    key_value: torch.Tensor

    @property
    def stored_tokens(self) -> int:
        """Number of distinct KV tokens, or the sum over rows if nothing is shared."""
        parts = [part for path in self.paths for part in path]
        if not self.case.per_beam:
            parts = list({id(part.segment): part for part in parts}.values())
        return sum(part.visible for part in parts)

    @property
    def needed_bytes(self) -> int:
        """Bytes that a layer of a step must move at least."""
        layout = self.store.pool.layout
        token_bytes = layout.bytes_per_token // layout.num_layers
        tails = 0 if self.case.chunk is not None else self.case.rows * self.case.tail
        stored = (self.stored_tokens + tails) * token_bytes
        return stored + self.key_value.nbytes + 2 * self.query.nbytes

    @property
    def flops(self) -> int:
        """FLOPs of a layer's two attention products."""
        new = self.case.chunk or 1
        own = new * (new + 1) // 2 + (0 if self.case.chunk else self.case.tail)
        seen = sum(part.visible for path in self.paths for part in path) * new
        heads, head_dim = self.query.shape[1:]
        return 4 * heads * head_dim * (seen + self.case.rows * own)

    def step(self, name: str) -> tuple[Callable[[int], torch.Tensor], Callable[[], None]]:
        """Return a function that attends in a layer, and one that frees its resources.

        name: a backend; `tree`, `dense` and `reference` are torch's.
        """
        pool = self.store.pool
        known = (pool.storage.device, pool.layout.dtype) if name.startswith("triton") else ()
        backend = make_attention(name, *known)
        if self.case.chunk is not None:
            lengths = [self.case.chunk] * self.case.rows
            view: Any = backend.prefill_view(self.store, self.paths, lengths)
            return lambda layer: view.attend(layer, self.query, self.key_value), view.close
        tail, close = self._tail(backend)
        view = backend.decode_view(self.store, self.paths, tail)
        return lambda layer: view.attend(layer, self.query, self.key_value), close

    def _tail(self, backend: Any) -> tuple[Any, Callable[[], None]]:
        """Fill the rows' tails with copies of the current token; return them and their closer."""
        pool, rows, count = self.store.pool, self.case.rows, self.case.tail
        if not backend.writes_blocks:
            tails = RowTails(self.store, 256)
            tails.arrange([], rows)
            tails.set_lengths([0] * rows, count + 1)
            for _ in range(count):
                for layer in range(pool.layout.num_layers):
                    tails.write(layer, self.key_value)
                tails.advance()
            return tails, tails.close
        own = [self.store.create() for _ in range(rows)]
        held = self.key_value[:, None].expand(-1, pool.layout.num_layers, -1, -1, -1)
        self.store.append(own, [held.repeat_interleave(count, dim=0)], [count] * rows)
        self.store.reserve(dict.fromkeys(own, count + 1))
        tail = backend.make_tail(self.store)
        tail.arrange([], rows)
        tail.set_segments([(segment, 0) for segment in own])
        tail.set_lengths([count] * rows, 1)
        return tail, lambda: [self.store.free(segment) for segment in own]


def build(case: AttentionCase, dtype: torch.dtype, device: str) -> Kernels:
    """Build a case with random KV and random queries."""
    kv_heads, group, head_dim = HEADS[case.model]
    layout = KVLayout(_LAYERS, kv_heads, head_dim, dtype)
    tokens = (case.rows if case.per_beam else 1) * case.length + 4 * case.rows * case.step + 1024
    budget = ByteBudget(2 * tokens * layout.bytes_per_token)
    store = SegmentStore(BlockPool([layout], budget, device))
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def extend(path: Path, tokens: int) -> Path:
        for start in range(0, tokens, case.step):
            segment, count = store.create(), min(case.step, tokens - start)
            store.append([segment], [draw(count, _LAYERS, 2, kv_heads, head_dim)])
            path = (*path, PathPart(segment, count))
        return path

    paths = _build_paths(case, extend)
    total = case.rows * (case.chunk or 1)
    heads = kv_heads * group
    product = draw(total, heads + 2 * kv_heads, head_dim)  # fused, as in a model
    key_value = product[:, heads:].unflatten(1, (2, kv_heads))
    return Kernels(case, store, paths, product[:, :heads], key_value)


def _build_paths(case: AttentionCase, extend: Callable[[Path, int], Path]) -> list[Path]:
    """Build the case's paths, in depth-first order."""
    if case.layout == "separate":
        return [extend((), case.length) for _ in range(case.rows)]
    if case.layout == "shared":
        return [extend((), case.length)] * case.rows
    level, levels = 1, 0
    while level < case.rows:
        level, levels = level * case.width, levels + 1
    paths = [extend((), case.length - levels * case.step)]
    for _ in range(levels):
        paths = [extend(path, case.step) for path in paths for _ in range(case.width)]
    return paths[: case.rows]


# --- on the card -----------------------------------------------------------------------------


class Clock:
    """Stopwatch for device work with a cold L2 cache."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(max(4 * l2_bytes, 2**28), dtype=torch.uint8, device="cuda")

    def us(self, call: Callable[[], Any]) -> float:
        """Median microseconds of a call."""
        for _ in range(3):
            call()
        pairs = []
        for _ in range(self._repeats):
            self._flush.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in pairs)


def graph_of(call: Callable[[], Any]) -> Callable[[], None]:
    """Capture a call as a CUDA graph and return its replay; host work runs only here."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ceilings(clock: Clock, dtype: torch.dtype) -> tuple[float, float]:
    """Measure bytes/s of a copy (reads plus writes), and FLOP/s of a matrix product."""
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy_s = clock.us(lambda: target.copy_(source)) / 1e6
    left, right = (torch.randn(_MATRIX, _MATRIX, device="cuda").to(dtype) for _ in range(2))
    product_s = clock.us(lambda: left @ right) / 1e6
    return 2 * source.nbytes / copy_s, 2 * _MATRIX**3 / product_s


def measure(bench: Kernels, clock: Clock, bandwidth: float, flops: float) -> list[dict[str, Any]]:
    """Time our kernel and torch's backend; return a row of each."""
    case = bench.case
    layout = "dense" if case.per_beam else "tree"
    floor_us = 1e6 * max(bench.needed_bytes / bandwidth, bench.flops / flops)
    oracle, close = bench.step("reference")
    expected = oracle(0).float()
    close()
    rows = []
    for name in (f"triton-{layout}", layout):
        before = bench.store.scratch.used_bytes
        call, close = bench.step(name)
        difference = float((call(0).float() - expected).norm() / expected.norm())
        partials = bench.store.scratch.used_bytes - before
        layers = [partial(call, layer) for layer in range(_LAYERS)]
        timed = _timed(clock, layers, bench.needed_bytes, floor_us)
        close()
        rows.append(
            {
                "model": case.model,
                "work": case.name,
                "rows": case.rows,
                "backend": name,
                **timed,
                "partial_mb": round(partials / 1e6, 1),
                "difference": float(f"{difference:.2g}"),
            }
        )
        say(f"  {case.model} {case.name} x{case.rows} {name}: {timed['us']} us")
    return rows


def _timed(
    clock: Clock, calls: Sequence[Callable[[], object]], num_bytes: int, floor_us: float
) -> dict[str, float]:
    """Mean microseconds of calls in sequence, captured and eager, beside the floor."""

    def all_calls() -> None:
        for call in calls:
            call()

    us, eager_us = (clock.us(each) / len(calls) for each in (graph_of(all_calls), all_calls))
    return {
        "us": round(us, 1),
        "eager_us": round(eager_us, 1),
        "floor_us": round(floor_us, 1),
        "share_of_floor": round(floor_us / us, 3),
        "gb_s": round(num_bytes / us / 1e3, 1),
    }


def sampling_functions(
    num_rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: str,
    sampling: SamplingSettings = SamplingSettings(),  # noqa: B008 (frozen)
) -> tuple[torch.Tensor, dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]]:
    """Return logits, and a sampling function by implementation (torch, triton).

    Each function returns the rows' tokens and their log-probabilities.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(num_rows, vocab, generator=generator, device=device).to(dtype)
    keys = stack_keys([lineage_key(0, (0, row)) for row in range(num_rows)], logits.device)
    positions = torch.arange(num_rows, device=device)
    how = RowSampling.of([sampling] * num_rows, logits.device)
    samplers = {
        name: Sampler(vocab, logits.device, captured=True, fused=fused)
        for name, fused in (("torch", False), ("triton", True))
    }
    return logits, {
        name: partial(sampler.sample, logits, keys, positions, how)
        for name, sampler in samplers.items()
    }


def measure_draws(
    work: str, sampling: SamplingSettings, clock: Clock, bandwidth: float, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Time sampling by torch and by our kernel. difference: largest in log-probabilities."""
    logits, ways = sampling_functions(*_DRAW, dtype, "cuda", sampling)
    tokens, logprobs = ways["torch"]()
    floor_us = 1e6 * logits.nbytes / bandwidth
    rows = []
    for name, draw in ways.items():
        found = draw()
        timed = _timed(clock, [draw], logits.nbytes, floor_us)
        rows.append(
            {
                "model": f"vocabulary of {_DRAW[1]}",
                "work": work,
                "rows": _DRAW[0],
                "backend": name,
                **timed,
                "difference": float(f"{float((found[1] - logprobs).abs().max()):.2g}"),
                "other_tokens": int((found[0] != tokens).sum()),
            }
        )
        say(f"  {work} x{_DRAW[0]} {name}: {timed['us']} us")
    return rows


@torch.inference_mode()
def run(context: Context) -> dict[str, Any]:
    """Time every sampling and attention case; an error costs only its own row."""
    if not context.on_gpu:
        return {"skipped": "needs a GPU"}
    dtype = torch.bfloat16
    reason = why_no_kernels(torch.device(context.device), dtype)
    if reason is not None:
        return {"skipped": reason}
    data: dict[str, Any] = {"dtype": str(dtype), "rows": [], "not_run": []}
    clock = Clock(_REPEATS)
    bandwidth, flops = ceilings(clock, dtype)
    data |= {"copy_gb_s": round(bandwidth / 1e9, 1), "product_tflops": round(flops / 1e12, 1)}
    context.save(data)

    def measured(case: AttentionCase | str) -> list[dict[str, Any]]:
        if isinstance(case, str):
            return measure_draws(case, _DRAWS[case], clock, bandwidth, dtype)
        return measure(build(case, dtype, context.device), clock, bandwidth, flops)

    work: list[AttentionCase | str] = [*_DRAWS, *cases()]
    for case in work:
        what = {"work": case} if isinstance(case, str) else {"model": case.model, "work": case.name}
        if context.left_s < _LEAST_S:
            data["not_run"].append(what)
            continue
        try:
            data["rows"] += measured(case)
        except Exception as error:
            data["rows"].append({**what, "error": one_line(error)})
        release(context.device)
        context.save(data)
    return data
