"""Serving engines on a virtual clock: the fair baselines of a tree search.

`schedule.engines` has the rules; here they take time. Each round's steps are sent at once, the next
round's when all are complete. Attention reads a paged KV cache either row by row, as FlashAttention
does, or shared parts once (cascade attention); memory holds shared parts once in any case.
Generator only: scoring, selection and the engine's own Python take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from beamwright.cost import Layout, ModelCosts
from beamwright.cost.model import Hardware
from beamwright.errors import CapacityError
from beamwright.kv import Direction, Transfer
from beamwright.runtime.simulation.clock import VirtualClock
from beamwright.runtime.simulation.costs import RooflineCosts
from beamwright.runtime.simulation.link import VirtualLink
from beamwright.runtime.simulation.replay import ReplayTree
from beamwright.schedule.engines import (
    Engine,
    Foresight,
    Iteration,
    Request,
    SglangEngine,
    VllmEngine,
    requests_by_round,
)

_BLOCK_TOKENS = 16

Rounds = list[list[Request]]


@dataclass(frozen=True)
class EngineRules:
    """An engine, and how it reads KV. make: from the device's tokens of KV and the rounds."""

    meaning: str
    make: Callable[[int, Rounds], Engine]
    reads_once: bool


def _vllm(*, offload: bool) -> Callable[[int, Rounds], Engine]:
    return lambda tokens, rounds: VllmEngine(tokens // _BLOCK_TOKENS, offload=offload)


def _sglang(*, hicache: bool) -> Callable[[int, Rounds], Engine]:
    return lambda tokens, rounds: SglangEngine(tokens, hicache=hicache)


def _clairvoyant(tokens: int, rounds: Rounds) -> Engine:
    return SglangEngine(tokens, hicache=True, foresight=Foresight(rounds))


_RULES = {
    "vllm": ("vLLM, prefix cache, preemption by recompute", _vllm(offload=False)),
    "vllm-offload": ("the same with its offloading connector", _vllm(offload=True)),
    "sglang": ("SGLang, dfs-weight, no host tier", _sglang(hicache=False)),
    "sglang-hicache": ("the same with HiCache, write-back", _sglang(hicache=True)),
    "clairvoyant": ("the same, evicting what is needed last (Belady)", _clairvoyant),
}
ENGINES: Mapping[str, EngineRules] = MappingProxyType(
    {
        name + ending: EngineRules(f"{meaning}; {reads}", make, bool(ending))
        for name, (meaning, make) in _RULES.items()
        for ending, reads in (("", "KV read row by row"), ("-shared", "shared KV read once"))
    }
)
"""By name; `-shared` reads shared KV once."""
FAIR = tuple(name for name in ENGINES if not name.startswith("clairvoyant"))
"""Engines that exist, if not with both ways to read: the strongest one is the fair baseline."""


@dataclass(frozen=True)
class EngineResult:
    """One search on one engine.

    time_s: compute_s + stall_s, stall_s being waits for the link; io_share: stall_s / time_s.
    iterations: forward passes. prefilled_tokens: forwarded as prompts; recomputed_tokens: of
    them, those whose KV had been computed before or was computed twice.
    """

    time_s: float
    compute_s: float
    stall_s: float
    io_share: float
    h2d_bytes: int
    d2h_bytes: int
    iterations: int
    preemptions: int
    prefilled_tokens: int
    recomputed_tokens: int
    device_peak_bytes: int
    host_peak_bytes: int


def simulate_engine(
    name: str, tree: ReplayTree, model: ModelCosts, hardware: Hardware, kv_budget_bytes: int
) -> EngineResult:
    """Run the search on one of `ENGINES`.

    Raises:
        CapacityError: if the device cannot hold the longest path and a block more.
    """
    rounds = requests_by_round(tree.prompt_tokens, tree.nodes)
    token_bytes = model.kv_bytes_per_token
    longest = max(request.final_tokens for each in rounds for request in each)
    needed = (longest + _BLOCK_TOKENS) * token_bytes
    if needed > kv_budget_bytes:
        raise CapacityError("the longest path", needed, kv_budget_bytes, kv_budget_bytes)
    rules = ENGINES[name]
    engine = rules.make(kv_budget_bytes // token_bytes, rounds)
    run = _Run(engine, RooflineCosts.of(model, hardware, Layout.TREE), rules.reads_once)
    for requests in rounds:
        run.round(requests)
    return run.result(token_bytes, _needed_prefill(rounds))


def _needed_prefill(rounds: Rounds) -> int:
    """The prompt, and the last token of every step that is extended."""
    extended = {request.path[-1] for requests in rounds[1:] for request in requests}
    return rounds[0][0].prompt_tokens + len(extended)


class _Run:
    """An engine, a clock and a link."""

    def __init__(self, engine: Engine, costs: RooflineCosts, reads_once: bool) -> None:
        self._engine, self._costs, self._once = engine, costs, reads_once
        self._clock = VirtualClock()
        self._link = VirtualLink(self._clock, costs.transfer)
        self._token_bytes = costs.roofline.model.kv_bytes_per_token
        self._arriving: dict[Request, Transfer] = {}
        self._stall_s = 0.0
        self._iterations = self._prefilled = 0

    def round(self, requests: list[Request]) -> None:
        """Send the requests; ends when all are complete."""
        self._engine.submit(requests)
        left = len(requests)
        while left:
            self._receive()
            iteration = self._engine.schedule()
            for request, tokens in iteration.loads:
                self._arriving[request] = self._move(Direction.H2D, tokens)
            if iteration.rows:
                left -= self._forward(iteration)
            else:
                assert self._arriving, "an engine without work waits for something"
                self._wait(next(iter(self._arriving.values())))

    def _receive(self) -> None:
        """Tell the engine what has arrived."""
        for request in [each for each, one in self._arriving.items() if one.finished]:
            del self._arriving[request]
            self._engine.loaded(request)

    def _forward(self, iteration: Iteration) -> int:
        """Let an iteration run; returns the number of complete requests."""
        if iteration.evicted_tokens:
            self._wait(self._move(Direction.D2H, iteration.evicted_tokens))
        if iteration.store_tokens:
            self._move(Direction.D2H, iteration.store_tokens)
        load = self._move(Direction.H2D, iteration.load_tokens) if iteration.load_tokens else None
        self._clock.advance(self._compute_s(iteration))
        if load is not None:
            self._wait(load)
        self._iterations += iteration.passes
        return len(self._engine.commit(iteration))

    def _compute_s(self, iteration: Iteration) -> float:
        new = per_row = seen = 0
        for request, tokens in iteration.rows:
            new += tokens
            per_row += request.computed + tokens
            seen += tokens * request.computed + tokens * (tokens + 1) // 2
            # The newest token of a prompt that came back was drawn before: all of it is prefill.
            if tokens > 1 or not request.drawn:
                self._prefilled += tokens
        read = iteration.distinct_tokens if self._once else per_row
        if iteration.passes == 1:
            return self._costs.prefill(new, read, seen)
        rows = len(iteration.rows)
        return self._costs.tokens(rows, read, seen, rows, iteration.passes)

    def _move(self, direction: Direction, tokens: int) -> Transfer:
        pieces = -(-tokens // _BLOCK_TOKENS)
        return self._link.submit_bytes(direction, "kv", tokens * self._token_bytes, pieces)

    def _wait(self, transfer: Transfer) -> None:
        self._stall_s += self._link.wait([transfer])

    def result(self, token_bytes: int, needed_prefill: int) -> EngineResult:
        time_s, moved = self._clock.now_s, self._link.bytes_moved
        return EngineResult(
            time_s=time_s,
            compute_s=time_s - self._stall_s,
            stall_s=self._stall_s,
            io_share=self._stall_s / time_s,
            h2d_bytes=moved[Direction.H2D],
            d2h_bytes=moved[Direction.D2H],
            iterations=self._iterations,
            preemptions=self._engine.preemptions,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._prefilled - needed_prefill,
            device_peak_bytes=self._engine.peak_tokens * token_bytes,
            host_peak_bytes=self._engine.host_peak_tokens * token_bytes,
        )


__all__ = ["ENGINES", "FAIR", "EngineResult", "EngineRules", "simulate_engine"]
