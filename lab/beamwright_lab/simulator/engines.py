"""Simulated vLLM and SGLang on a virtual clock: the fair baselines of a tree search.

Package `rivals` has their scheduling rules. All steps of a round are sent at once, and the next
round's when all are complete. Attention reads KV row by row, as FlashAttention does, or shared
prefixes once (cascade attention). Memory always holds shared prefixes once. Only the generator
takes time: scoring, selection and the engine's Python are free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from beamwright.counters import Progress
from beamwright.errors import CapacityError
from beamwright.kv.link import Transfer
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.protocols import Direction
from beamwright_lab.rivals.requests import Iteration, RequestEngine, StepRequest, requests_by_round
from beamwright_lab.rivals.sglang import AdmissionForesight, SglangEngine, WritePolicy
from beamwright_lab.rivals.vllm import StepEngine, VllmEngine
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import DraftedCosts, Drafts, RooflineCosts
from beamwright_lab.simulator.link import VirtualLink
from beamwright_lab.simulator.recorded import RecordedTree

Rounds = list[list[StepRequest]]

_PAGE_TOKENS = 16  # tokens per KV block


@dataclass(frozen=True)
class EngineRules:
    """A row of `ENGINES`.

    make: creates the engine from the device's KV capacity in tokens, and the rounds.
    host_tier: KV that does not fit is moved to host memory.
    waits: some requests wait for loads while others run, so schedules depend on time.
    """

    meaning: str
    make: Callable[[int, Rounds], RequestEngine]
    host_tier: bool = False
    waits: bool = False


def _vllm_factory(*, offload: bool) -> Callable[[int, Rounds], RequestEngine]:
    return lambda tokens, rounds: VllmEngine(tokens // _PAGE_TOKENS, offload=offload)


def _sglang_factory(hicache: WritePolicy | None) -> Callable[[int, Rounds], RequestEngine]:
    return lambda tokens, rounds: SglangEngine(tokens, hicache=hicache)


def _make_step_engine(tokens: int, rounds: Rounds) -> RequestEngine:
    return StepEngine(tokens // _PAGE_TOKENS)


def _make_clairvoyant(tokens: int, rounds: Rounds) -> RequestEngine:
    return SglangEngine(tokens, hicache="write_back", foresight=AdmissionForesight(rounds))


ENGINES: Mapping[str, EngineRules] = MappingProxyType(
    {
        "vllm": EngineRules(
            "vLLM: prefix cache, preemption by recompute", _vllm_factory(offload=False)
        ),
        "vllm-offload": EngineRules(
            "vLLM with its offloading connector",
            _vllm_factory(offload=True),
            host_tier=True,
            waits=True,
        ),
        "sglang": EngineRules("SGLang: dfs-weight, no host tier", _sglang_factory(None)),
        "sglang-hicache": EngineRules(
            "SGLang with HiCache, write-through", _sglang_factory("write_through"), host_tier=True
        ),
        "sglang-write-back": EngineRules(
            "SGLang with HiCache, write-back", _sglang_factory("write_back"), host_tier=True
        ),
        "step": EngineRules(
            "vLLM that stops its lowest-scored path where memory ends", _make_step_engine
        ),
        "clairvoyant": EngineRules(
            "write-back, evicting what is needed last (Belady): a bound",
            _make_clairvoyant,
            host_tier=True,
        ),
    }
)
# Engines that exist. The fastest of them is the fair baseline.
FAIR = ("vllm", "vllm-offload", "sglang", "sglang-hicache", "sglang-write-back")


@dataclass(frozen=True)
class EngineResult:
    """Time, traffic and memory of one search on one engine.

    time_s: compute_s + stall_s.
    stall_s: seconds of waiting for the link; io_share: stall_s / time_s.
    iterations: number of forward passes.
    prefilled_tokens: tokens forwarded as prompts; recomputed_tokens: those of them whose KV had
        been computed before.
    completed: share of the tree's steps decoded to their end; 1 unless the engine stops paths.
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
    completed: float
    device_peak_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True)
class EngineCase:
    """A search, model and machine for `simulate_engine`.

    drafts: effect of the engine's n-gram speculative decoding; None: off.
    """

    tree: RecordedTree
    model: ModelCosts
    hardware: HardwareProfile
    kv_budget_bytes: int
    drafts: Drafts | None = None

    @property
    def costs(self) -> RooflineCosts:
        roofline = Roofline(self.model, self.hardware)
        if self.drafts is None:
            return RooflineCosts(roofline, Layout.TREE)
        return DraftedCosts(roofline, Layout.TREE, self.drafts)


def simulate_engine(
    case: EngineCase, name: str, progress: Progress | None = None
) -> tuple[EngineResult, EngineResult]:
    """Simulate the search on one of `ENGINES`.

    Returns two results: with KV read row by row, and with shared prefixes read once.

    progress: is told about rounds and tokens, twice if the engine's rules have `waits`.

    Raises:
        CapacityError: if the device cannot hold the longest path and one more block.
    """
    rules, progress = ENGINES[name], progress or Progress()
    rounds = requests_by_round(case.tree.prompt_tokens, case.tree.nodes)
    token_bytes = case.model.kv_bytes_per_token
    longest = max(request.final_tokens for each in rounds for request in each)
    needed = (longest + _PAGE_TOKENS) * token_bytes
    if needed > case.kv_budget_bytes:
        free = case.kv_budget_bytes
        raise CapacityError("the longest path", needed, free, free)
    costs = case.costs
    by_row, once = EngineMeter(costs, reads_once=False), EngineMeter(costs, reads_once=True)
    for meters in ([by_row], [once]) if rules.waits else ([by_row, once],):
        fresh = requests_by_round(case.tree.prompt_tokens, case.tree.nodes)
        run = EngineRun(rules.make(case.kv_budget_bytes // token_bytes, rounds), meters)
        for number, requests in enumerate(fresh, start=1):
            progress.doing(f"round {number}: {len(requests)} requests")
            run.run_round(requests)
            progress.wrote(sum(each.step_tokens for each in requests))
        for meter in meters:
            meter.ran = run
    num_steps = len(case.tree.nodes)
    return by_row.result(num_steps), once.result(num_steps)


class EngineRun:
    """A search on an engine, timed by one or more meters.

    completed: steps decoded to their end.
    prefilled: tokens forwarded as prompts.
    needed_prefill: those that an unlimited prefix cache would also have to compute.
    """

    def __init__(self, engine: RequestEngine, meters: Sequence[EngineMeter]) -> None:
        self.engine = engine
        self.iterations = self.completed = 0
        self.prefilled = self.needed_prefill = 0
        self._meters = meters
        self._arriving: dict[StepRequest, Transfer] = {}

    def run_round(self, requests: list[StepRequest]) -> None:
        """Run one round: send its requests until each is complete or stopped by the engine.

        Requests behind a stopped step are left out.
        """
        requests = [each for each in requests if self.engine.stopped.isdisjoint(each.path)]
        parents = {each.path[-1]: each.lengths[-1] for each in requests}
        self.needed_prefill += sum(1 if node else tokens for node, tokens in parents.items())
        self.engine.submit(requests)
        complete, stopped = 0, len(self.engine.stopped)
        while complete + len(self.engine.stopped) - stopped < len(requests):
            self._report_loads()
            iteration = self.engine.schedule()
            for request, tokens in iteration.loads:
                (meter,) = self._meters
                self._arriving[request] = meter.move(Direction.H2D, tokens)
            if iteration.rows:
                self._count(iteration)
                for meter in self._meters:
                    meter.forward(iteration)
                complete += len(self.engine.commit(iteration))
            else:
                assert self._arriving, "an engine without rows waits for a load"
                self._meters[0].wait(next(iter(self._arriving.values())))
        self.completed += complete

    def _report_loads(self) -> None:
        """Report finished loads to the engine."""
        for request in [each for each, one in self._arriving.items() if one.finished]:
            del self._arriving[request]
            self.engine.loaded(request)

    def _count(self, iteration: Iteration) -> None:
        self.iterations += iteration.passes
        self.prefilled += sum(
            tokens for request, tokens in iteration.rows if tokens > 1 or not request.drawn
        )


class EngineMeter:
    """The time of an engine's iterations, on its own clock and link.

    reads_once: True if attention reads shared prefixes once, else row by row.
    ran: the measured search, set before `result` is called.
    """

    ran: EngineRun

    def __init__(self, costs: RooflineCosts, *, reads_once: bool) -> None:
        self._costs, self._once = costs, reads_once
        self._clock = VirtualClock()
        self._link = VirtualLink(self._clock, costs.transfer)
        self._token_bytes = costs.roofline.model.kv_bytes_per_token
        self._stall_s = 0.0

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def move(self, direction: Direction, tokens: int) -> Transfer:
        pieces = -(-tokens // _PAGE_TOKENS)
        return self._link.submit_bytes(direction, "kv", tokens * self._token_bytes, pieces)

    def wait(self, transfer: Transfer) -> None:
        """Stall the device until the transfer has ended."""
        self._stall_s += self._link.wait([transfer])

    def forward(self, iteration: Iteration) -> None:
        """Advance the clock over an iteration and its transfers."""
        if iteration.evicted_tokens:
            self.wait(self.move(Direction.D2H, iteration.evicted_tokens))
        if iteration.store_tokens:
            self.move(Direction.D2H, iteration.store_tokens)
        load = self.move(Direction.H2D, iteration.load_tokens) if iteration.load_tokens else None
        self._clock.advance(self._compute_s(iteration))
        if load is not None:
            self.wait(load)

    def _compute_s(self, iteration: Iteration) -> float:
        new = by_row = seen = 0
        for request, tokens in iteration.rows:
            new += tokens
            by_row += request.computed + tokens
            seen += tokens * request.computed + tokens * (tokens + 1) // 2
        read = iteration.distinct_tokens if self._once else by_row
        if len(iteration.rows) == new:
            return self._costs.tokens(new, read, seen, new, iteration.passes).seconds
        return self._costs.prefill(new, read, seen).seconds - self._draft_savings_s(iteration, read)

    def _draft_savings_s(self, iteration: Iteration, read: int) -> float:
        """Return the seconds that drafts save for rows that decode in the pass of a prefill."""
        seen = [request.computed + 1 for request, tokens in iteration.rows if tokens == 1]
        if not seen:
            return 0.0
        alone = self._costs.prefill(len(seen), read, sum(seen)).seconds
        return alone - self._costs.tokens(len(seen), read, sum(seen), len(seen), 1).seconds

    def result(self, num_steps: int) -> EngineResult:
        """Return the measurements of a search whose tree has `num_steps` steps."""
        time_s, moved, run = self._clock.now_s, self._link.bytes_moved, self.ran
        return EngineResult(
            time_s=time_s,
            compute_s=time_s - self._stall_s,
            stall_s=self._stall_s,
            io_share=self._stall_s / time_s,
            h2d_bytes=moved[Direction.H2D],
            d2h_bytes=moved[Direction.D2H],
            iterations=run.iterations,
            preemptions=run.engine.preemptions,
            prefilled_tokens=run.prefilled,
            recomputed_tokens=run.prefilled - run.needed_prefill,
            completed=run.completed / num_steps,
            device_peak_bytes=run.engine.peak_tokens * self._token_bytes,
            host_peak_bytes=run.engine.host_peak_tokens * self._token_bytes,
        )
