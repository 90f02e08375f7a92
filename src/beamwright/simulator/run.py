"""Simulate one search under one schedule: the real loop, policies and residency on a virtual clock.

Knows how the parts fit together. The verifier scores in turn with decoding; where none is given,
scoring takes no time. Selection and pruning never do: they are counts on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from beamwright.config import ScheduleSettings, Speculation, StepSettings
from beamwright.cost import Layout, ModelCosts, dm_lower_bound_bytes, traffic_bound
from beamwright.cost.growth import BLOCK_TOKENS
from beamwright.cost.model import Hardware
from beamwright.cost.scoring import MARK_TOKENS
from beamwright.decode import Batching, Decoding, Decodings, RunningBatch, StepLengths
from beamwright.errors import CapacityError
from beamwright.kv import BlockLedger, ByteBudget, CacheStats, Direction, HostTier
from beamwright.models.prefill import PrefillRequest, remember
from beamwright.protocols import Foresees, Verifier
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.engine import Engine
from beamwright.runtime.executor import PlainExecutor, StepWriter
from beamwright.runtime.moving import MoveCounts, MovingSplit
from beamwright.runtime.timeline import Timeline
from beamwright.runtime.tree_run import TreeRun
from beamwright.schedule import make_schedule, schedule_row
from beamwright.simulator.clock import VirtualClock
from beamwright.simulator.costs import DeviceCosts
from beamwright.simulator.layerwise import SimulatedLayerwise
from beamwright.simulator.link import VirtualLink
from beamwright.simulator.replay import (
    ReplayStrategy,
    ReplayVerifier,
    Script,
)
from beamwright.simulator.residency import SimulatedPrefill, SimulatedResidency
from beamwright.simulator.scripted_rows import Moments, ScriptedRows
from beamwright.simulator.verifier import SimulatedVerifier, VerifierCase
from beamwright.tree import RecordedTree

_TAIL_TOKENS = {Layout.DENSE: 64, Layout.TREE: 256}  # as in `attention`
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    costs: of the device, in the layout that attention reads. kv_budget_bytes: device KV.
    step: how long steps may be, as far as the schedule could know. context: of the model.
    host_bytes: KV on the host; None for as much as it takes. verifier: None where scores are free.
    split: of `runtime.moving`, by which memory moves between the two models while the search runs;
    None where their parts stay. hardware: what `roofline` reckons with.
    speculation: in the place of the schedule's, whose default depends on a real machine's clock.
    foresees: who says beforehand what selection may extend, see `ReplayStrategy`.
    """

    tree: RecordedTree
    model: ModelCosts
    costs: DeviceCosts
    kv_budget_bytes: int
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    step: StepSettings = field(default_factory=StepSettings)
    context: int = _NO_LIMIT
    host_bytes: int | None = None
    verifier: VerifierCase | None = None
    split: str | None = None
    hardware: Hardware | None = None
    speculation: Speculation = "off"
    foresees: Foresees | None = None


@dataclass(frozen=True)
class SimulationResult:
    """One search under one schedule.

    time_s: decode_s + verify_s + stall_s; decode_s: the generator's computing, prefills included;
        verify_s: scoring; io_share: stall_s / time_s.
    dm_lower_bound_bytes: what must cross the link whatever the schedule (from the tree
        and the budget alone), of the generator's KV.
    load_bound_bytes, store_bound_bytes: the same both ways, in blocks and with a beam's growth, for
        one who knows the whole tree; blind_store_bound_bytes: for one who keeps candidates until
        they are scored (`cost.clairvoyant`; they do not hold for layer-wise).
    cancelled: transfers that pruning made needless.
    speculated_tokens, kept_tokens: decoded ahead of selection, and those of them that it opened.
    goodput_tok_s: FlashTTS's precise goodput: mean tokens of a finished path over the mean seconds
        to the end of its scoring.
    device_peak_bytes, host_peak_bytes: of the generator's KV. verifier_peak_bytes: of the
        verifier's, on the device.
    generator_cache, verifier_cache: how often KV was where it was needed; None where none is kept
        or layers of it are streamed.
    split_moves, split_moved_bytes: device memory that went from one model to the other.
    """

    time_s: float
    decode_s: float
    verify_s: float
    stall_s: float
    io_share: float
    h2d_bytes: int
    d2h_bytes: int
    groups: int
    dm_lower_bound_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    verifier_peak_bytes: int
    recomputed_tokens: int
    cancelled: int
    load_bound_bytes: int
    store_bound_bytes: int
    blind_store_bound_bytes: int
    split_moves: int
    split_moved_bytes: int
    speculated_tokens: int = 0
    kept_tokens: int = 0
    goodput_tok_s: float = 0.0
    generator_cache: CacheStats | None = None
    verifier_cache: CacheStats | None = None


class _Bench:
    """The parts of one simulation."""

    def __init__(
        self,
        case: Simulation,
        clock: VirtualClock,
        timeline: Timeline | None,
        moments: Moments | None,
    ) -> None:
        self.case, self.clock, self.moments = case, clock, moments
        self.script = Script(case.tree)
        self.link = VirtualLink(
            self.clock,
            case.costs.transfer,
            emulated_bandwidth=case.schedule.link_bandwidth,
            timeline=timeline,
        )
        self.budget = ByteBudget(case.kv_budget_bytes)
        self.scorer: SimulatedResidency | None = None
        self.residency: SimulatedResidency | None = None
        self.layerwise: SimulatedLayerwise | None = None
        self.writer = self._writer(timeline)
        self.verifier = self._verifier()

    def _writer(self, timeline: Timeline | None) -> StepWriter:
        case = self.case
        tail_tokens = _TAIL_TOKENS[case.costs.layout]
        if schedule_row(case.schedule).streams_layers:
            self.layerwise = SimulatedLayerwise(
                case.model,
                case.costs,
                self.budget,
                self.link,
                self.clock,
                self.script,
                tail_tokens,
            )
            return self.layerwise
        self.residency = self._residency(case.model, case.costs, self.budget, 0, timeline)
        rows = ScriptedRows(
            self.residency, self.clock, case.costs, self.script, tail_tokens, self.moments
        )
        batching = replace(Batching.of(case.schedule), speculation=case.speculation)
        lengths = StepLengths(Decodings(Decoding(step=case.step)), case.context)
        prefill = self._prefill(self.residency, case.costs)
        return RunningBatch(rows, self.residency, prefill, lengths, batching)

    def _prefill(
        self, residency: SimulatedResidency, costs: DeviceCosts
    ) -> Callable[[Sequence[PrefillRequest]], list[bool]]:
        prefill, recomputes = SimulatedPrefill(residency, self.clock, costs), False
        if residency.host is not None:
            recomputes = residency.host.recompute

        def run(requests: Sequence[PrefillRequest]) -> list[bool]:
            prefill.run(requests)
            if recomputes:
                for request in requests:
                    remember(request, request.token_ids)
            return [True] * len(requests)

        return run

    def _verifier(self) -> Verifier:
        found = self.case.verifier
        if found is None:
            return ReplayVerifier(self.script)
        budget = ByteBudget(found.kv_budget_bytes, "device KV budget of the verifier")
        self.scorer = self._residency(found.model, found.costs, budget, MARK_TOKENS)
        prefill = SimulatedPrefill(self.scorer, self.clock, found.costs)
        return SimulatedVerifier(self.scorer, prefill, self.script)

    def _residency(
        self,
        model: ModelCosts,
        costs: DeviceCosts,
        budget: ByteBudget,
        extra_tokens: int,
        log: Timeline | None = None,
    ) -> SimulatedResidency:
        """The KV of one model, whose steps are longer than the script's by `extra_tokens`."""
        bytes_per_token, host = model.kv_bytes_per_token, None
        if not schedule_row(self.case.schedule).resident:
            host = self._host_tier(bytes_per_token, extra_tokens)
        return SimulatedResidency(
            BlockLedger(bytes_per_token, BLOCK_TOKENS, budget, self._most_bytes()),
            host,
            self.clock,
            costs,
            copies_per_beam=costs.layout is Layout.DENSE,
            log=log,
        )

    def _host_tier(self, bytes_per_token: int, extra_tokens: int) -> HostTier:
        case = self.case
        if case.host_bytes is None:
            blocks = self.script.host_blocks(BLOCK_TOKENS, extra_tokens)
            num_bytes = blocks * BLOCK_TOKENS * bytes_per_token
        else:  # shared by KV bytes per token, as the device's
            verifier = 0 if case.verifier is None else case.verifier.model.kv_bytes_per_token
            total = case.model.kv_bytes_per_token + verifier
            num_bytes = case.host_bytes * bytes_per_token // total
        hint = "raise --host-memory, or use --evict recompute"
        ledger = BlockLedger(
            bytes_per_token, BLOCK_TOKENS, ByteBudget(num_bytes, "host KV budget", hint)
        )
        recompute = case.schedule.evict == "recompute"
        schedule = case.schedule
        return HostTier(ledger, self.link, recompute, schedule.inter_beam, schedule.victims)

    def _most_bytes(self) -> int | None:
        """How far a budget can grow; None where it stays."""
        case = self.case
        if case.split is None or case.verifier is None:
            return None
        return case.kv_budget_bytes + case.verifier.kv_budget_bytes

    def moving(self) -> MovingSplit | None:
        """What moves memory between the two models; None where nothing does."""
        case = self.case
        if case.verifier is None or self.scorer is None or self.residency is None:
            return None
        if case.hardware is None or case.split is None:
            return None
        costs = case.model, case.verifier.model
        longest = case.step.step_tokens or case.step.max_step_tokens
        return MovingSplit(
            self.residency,
            self.scorer,
            costs,
            case.hardware,
            case.split,
            longest,
            scores_early=case.speculation != "off",
        )

    def stalled_s(self) -> float:
        """Seconds in which compute waited for the link, the verifier's included."""
        stall_s = 0.0 if self.layerwise is None else self.layerwise.stall_s
        held = (self.residency, self.scorer)
        return stall_s + sum(each.counts.stall_s for each in held if each is not None)


def simulate(
    case: Simulation,
    clock: VirtualClock | None = None,
    timeline: Timeline | None = None,
    moments: Moments | None = None,
) -> SimulationResult:
    """Run the search on a virtual clock that starts at 0.

    timeline: collects what ran when; it has to read the same clock. moments: collects what is in
    use after every iteration, for `cost.known_future_loads`; not for layer-wise.

    Raises:
        CapacityError: if the search does not fit under this schedule.
    """
    bench = _Bench(case, clock or VirtualClock(), timeline, moments)
    accounting = Accounting(bench.clock)
    writer = bench.writer
    executor = PlainExecutor(writer, bench.verifier, accounting, bench.stalled_s, timeline)
    strategy = ReplayStrategy(bench.script, case.foresees)
    run = TreeRun(bench.script.search_tree(), strategy, _last, lambda tree: Random(0))
    engine = Engine(executor, make_schedule(case.schedule), accounting, bench.clock)
    moving = bench.moving()
    if moving is None:
        engine.run([run])
    else:
        engine.run([run], moving.look)
    if run.error is not None:
        raise run.error
    return _result(bench, run, accounting, None if moving is None else moving.counts)


def simulate_if_fits(case: Simulation) -> SimulationResult | None:
    """The same; None if the search does not fit under this schedule."""
    try:
        return simulate(case)
    except CapacityError:
        return None


def _last(scores: Sequence[float | None]) -> float | None:
    return scores[-1]


def _result(
    bench: _Bench, run: TreeRun, accounting: Accounting, moved: MoveCounts | None
) -> SimulationResult:
    most_bytes = bench.case.kv_budget_bytes if moved is None else moved.most_generator_bytes
    residency = bench.residency
    host = residency.host if residency is not None else None
    time_s, stall_s = bench.clock.now_s, accounting.seconds["stall"]
    verify_s = accounting.seconds["verify"]
    block_bytes = BLOCK_TOKENS * bench.case.model.kv_bytes_per_token
    lives = bench.script.lives(BLOCK_TOKENS)
    bound = traffic_bound(lives, most_bytes // block_bytes)
    usage: Counter[str] = Counter()
    for node in run.tree.nodes():
        usage.update(node.usage)
    needed = (tokens * bench.case.model.kv_bytes_per_token for tokens in run.round_tokens)
    return SimulationResult(
        time_s=time_s,
        decode_s=time_s - verify_s - stall_s,
        verify_s=verify_s,
        stall_s=stall_s,
        io_share=stall_s / time_s if time_s else 0.0,
        h2d_bytes=bench.link.bytes_moved[Direction.H2D],
        d2h_bytes=bench.link.bytes_moved[Direction.D2H],
        groups=accounting.num_groups,
        dm_lower_bound_bytes=dm_lower_bound_bytes(needed, most_bytes),
        device_peak_bytes=bench.budget.peak_bytes,
        host_peak_bytes=host.ledger.budget.peak_bytes if host is not None else 0,
        verifier_peak_bytes=0 if bench.scorer is None else bench.scorer.device.budget.peak_bytes,
        recomputed_tokens=residency.counts.recomputed_tokens if residency is not None else 0,
        cancelled=residency.counts.cancelled if residency is not None else 0,
        load_bound_bytes=bound.loads * block_bytes,
        store_bound_bytes=bound.stores * block_bytes,
        blind_store_bound_bytes=bound.blind_stores * block_bytes,
        split_moves=0 if moved is None else moved.moves,
        split_moved_bytes=0 if moved is None else moved.moved_bytes,
        speculated_tokens=usage["speculated"],
        kept_tokens=usage["speculated_kept"],
        goodput_tok_s=run.goodput_tok_s(run.tree.finished()) or 0.0,
        generator_cache=None if residency is None else CacheStats.between(residency.counts.cache),
        verifier_cache=_of_verifier(bench),
    )


def _of_verifier(bench: _Bench) -> CacheStats | None:
    return None if bench.scorer is None else CacheStats.between(bench.scorer.counts.cache)
