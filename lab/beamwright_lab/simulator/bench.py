"""The bench: the parts of a simulation put together, and the trees that run on it.

Knows how the parts fit together. The verifier scores in turn with decoding, or beside it
(`simulator.lanes`); where none is given, scoring takes no time. Selection and pruning never do:
they are counts on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from beamwright.counters import Progress
from beamwright.engine.admission import TreeAdmission
from beamwright.engine.batch import RunningBatch
from beamwright.engine.capacity import Capacity, WorkingMemory
from beamwright.engine.engine import Engine
from beamwright.engine.executor import STEPS_TOGETHER, Executor, Lane
from beamwright.engine.row import Decoding, Decodings
from beamwright.engine.scoring import Scoring
from beamwright.engine.speculation import Payoff
from beamwright.engine.split import MovingSplit
from beamwright.engine.timeline import Accounting, Timeline
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError
from beamwright.kv.host import HostTier
from beamwright.kv.pool import BlockLedger, ByteBudget, GroupBlocks
from beamwright.models.prefill import PrefillRequest, remember
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.fits import MARK_TOKENS
from beamwright.plan.machines import HardwareProfile, PassCosts
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.protocols import Foresees, StepWriter, Verifier
from beamwright.schedule import make_schedule, schedule_row
from beamwright.sections import ScheduleSettings, Speculation, StepSettings
from beamwright_lab.baselines.layerwise.declare import streams_layers
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.lanes import LanedExecutor, SharedClock, Tape
from beamwright_lab.simulator.layerwise import SimulatedLayerwise
from beamwright_lab.simulator.link import VirtualLink
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.replay import ReplayStrategy, ReplayVerifier, Scripts
from beamwright_lab.simulator.residency import SimulatedPrefill, SimulatedResidency
from beamwright_lab.simulator.scripted_rows import Moments, ScriptedRows
from beamwright_lab.simulator.split import moving_split
from beamwright_lab.simulator.verifier import SimulatedVerifier, VerifierCase
from beamwright_lab.simulator.victims import TIERS, Victims

_TAIL_TOKENS = {Layout.DENSE: 64, Layout.TREE: 256}  # as in `attention`
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    costs: of the device, in the layout that attention reads. kv_budget_bytes: device KV.
    step: how long steps may be, as far as the schedule could know. context: of the model.
    host_bytes: KV on the host; None for as much as it takes. verifier: None where scores are free.
    split: of `simulator.split`, by which memory moves between the two models while the search runs;
    None where their parts stay. hardware: what `roofline` reckons with.
    speculation: in the place of the schedule's, whose default depends on a real machine's clock.
    foresees: who says beforehand what selection may extend, see `ReplayStrategy`.
    victims: whose KV leaves first, see `simulator.victims`.
    overlap: the verifier scores beside decoding (`simulator.lanes`); memory does not move then.
    """

    tree: RecordedTree
    model: ModelCosts
    costs: RooflineCosts
    kv_budget_bytes: int
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    step: StepSettings = field(default_factory=StepSettings)
    context: int = _NO_LIMIT
    host_bytes: int | None = None
    verifier: VerifierCase | None = None
    split: str | None = None
    hardware: HardwareProfile | None = None
    speculation: Speculation = "off"
    victims: Victims = "tree"
    foresees: Foresees | None = None
    overlap: bool = False


@dataclass(frozen=True)
class Seconds:
    """Where the time of a simulation goes: time_s = decode_s + verify_s + both_s + stall_s.

    decode_s: the generator's computing, prefills included; verify_s: scoring; both_s: those in
    which one ran beside the other, in neither of them. stall_s: waits for the link.
    """

    time_s: float
    decode_s: float
    verify_s: float
    both_s: float
    stall_s: float


class Bench:
    """The parts of one simulation.

    cases: what is searched; all but tree and foresight is of the first. progress: hears of rounds
    and tokens.
    """

    def __init__(
        self,
        cases: Sequence[Simulation],
        clock: VirtualClock | None = None,
        timeline: Timeline | None = None,
        moments: Moments | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._progress = progress
        self._cases, case = cases, cases[0]
        self.case, self.clock, self.moments = case, clock or _clock(case), moments
        self.scripts = Scripts([each.tree for each in cases])
        self.link = VirtualLink(
            self.clock,
            case.costs.transfer,
            timeline=timeline,
        )
        self.budget = ByteBudget(case.kv_budget_bytes)
        self.scorers: list[SimulatedResidency] = []
        self.verifiers: list[SimulatedVerifier] = []
        self.residency: SimulatedResidency | None = None
        self.layerwise: SimulatedLayerwise | None = None
        self.batch: RunningBatch | None = None
        self._writer = self._make_writer(timeline)
        counts = None if self.batch is None else self.batch.counts
        self.accounting = Accounting(self.clock, counts)
        executor = self._executor(timeline)
        schedule = make_schedule(case.schedule)
        self._payoff = Payoff()
        self._engine = Engine(
            executor,
            schedule,
            self.accounting,
            self.clock,
            self._payoff,
            explore=case.schedule.explore,
            verify_ahead=case.schedule.verify_ahead == "slack",
        )
        self.moving = self._make_moving()

    # --- trees -------------------------------------------------------------------------------

    def run(self, in_flight: int | None) -> list[TreeRun]:
        """Grow the trees to their end, taken in by `engine.admission` in their order.

        in_flight: at most so many at a time; None for as many as there is work for. One that does
        not fit beside others is tried once more behind all, alone.

        Raises:
            CapacityError: if one does not fit alone.
        """
        runs = self._grow(range(len(self._cases)), in_flight)
        if in_flight != 1:
            short = [i for i, run in runs.items() if isinstance(run.error, CapacityError)]
            runs |= self._grow(short, 1)
        for run in runs.values():
            if run.error is not None:
                raise run.error
        return list(runs.values())

    def _grow(self, numbers: Sequence[int], in_flight: int | None) -> dict[int, TreeRun]:
        """The same once; `TreeRun.error` says what has not fitted."""
        engine, scripts = self._engine, list(self.scripts)
        stores = [each for each in (self.residency, *self.scorers) if each is not None]
        admission = TreeAdmission(self.case.schedule, in_flight, stores, clock=self.clock)
        runs: dict[int, TreeRun] = {}
        waiting = deque(numbers)

        def has_place() -> bool:
            live = {run: scripts[i].num_beams for i, run in runs.items() if not run.tree.done}
            return admission.has_place(live, engine.num_open)

        try:
            while waiting or engine.num_live:
                while waiting and has_place():
                    i = waiting.popleft()
                    strategy = ReplayStrategy(scripts[i], self._cases[i].foresees)
                    tree = scripts[i].search_tree()
                    runs[i] = TreeRun(tree, strategy, _last, lambda tree: Random(0))
                    engine.admit(runs[i])
                if self.moving is not None:
                    self.moving.look([run for run in runs.values() if not run.tree.done])
                engine.step()
        finally:
            engine.abort()
        return runs

    # --- parts -------------------------------------------------------------------------------

    def _make_writer(self, timeline: Timeline | None) -> StepWriter:
        case = self.case
        tail_tokens = _TAIL_TOKENS[case.costs.layout]
        if streams_layers(case.schedule):
            self.layerwise = SimulatedLayerwise(
                case.model,
                case.costs,
                self.budget,
                self.link,
                self.clock,
                self.scripts,
                tail_tokens,
                self._progress,
            )
            return self.layerwise
        self.residency = self._residency(case.model, case.costs, self.budget, 0, timeline)
        rows = ScriptedRows(
            self.residency, self.clock, case.costs, self.scripts, tail_tokens, self.moments
        )
        settings = case.schedule.model_copy(update={"speculation": case.speculation})
        decodings = Decodings(Decoding(step=case.step))
        prefill = self._prefill(self.residency, case.costs)
        self.batch = RunningBatch(
            rows,
            self.residency,
            prefill,
            Capacity(self.residency, decodings, case.context),
            settings,
            WorkingMemory(costs=self._pass_costs()),
            progress=self._progress,
        )
        return self.batch

    def _pass_costs(self) -> PassCosts | None:
        """What a schedule may know of them: of the hardware that is named, or simulated."""
        case, roofline = self.case, getattr(self.case.costs, "roofline", None)
        if case.hardware is not None:
            roofline = Roofline(case.model, case.hardware)
        return None if roofline is None else roofline.pass_costs()

    def _prefill(
        self, residency: SimulatedResidency, costs: RooflineCosts
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

    def _executor(self, timeline: Timeline | None) -> Executor:
        most_steps = STEPS_TOGETHER[self.case.schedule.explore]
        if isinstance(self.clock, SharedClock) and self.case.verifier is not None:
            lanes = []
            for copy in range(self.case.verifier.copies):
                tape = Tape(self.clock, copy + 1 if self.case.verifier.own_cards else 0)
                lanes.append((self._verifier(tape), tape))
            return LanedExecutor(
                self._writer,
                lanes,
                self.accounting,
                self.clock,
                self._stalled_s,
                most_steps=most_steps,
            )
        verifier = self._verifier(self.clock)
        scoring = Scoring(verifier, self.accounting, self._stalled_s, timeline, most_steps)
        lane = Lane(scoring, self._progress)
        return Executor(self._writer, [lane], self._stalled_s, self._progress)

    def _verifier(self, clock: VirtualClock) -> Verifier:
        found = self.case.verifier
        if found is None:
            return ReplayVerifier(self.scripts)
        budget = ByteBudget(found.kv_budget_bytes, "device KV budget of the verifier")
        scorer = self._residency(found.model, found.costs, budget, MARK_TOKENS, clock=clock)
        prefill = SimulatedPrefill(scorer, clock, found.costs)
        self.scorers.append(scorer)
        self.verifiers.append(SimulatedVerifier(scorer, prefill, self.scripts))
        return self.verifiers[-1]

    def _residency(
        self,
        model: ModelCosts,
        costs: RooflineCosts,
        budget: ByteBudget,
        extra_tokens: int,
        log: Timeline | None = None,
        clock: VirtualClock | None = None,
    ) -> SimulatedResidency:
        """The KV of one model, whose steps are longer than the scripts' by `extra_tokens`."""
        host = None
        if not schedule_row(self.case.schedule).resident:
            host = self._host_tier(model, extra_tokens)
        return SimulatedResidency(
            _ledger(model, budget, self._most_bytes()),
            host,
            clock or self.clock,
            costs,
            copies_per_beam=costs.layout is Layout.DENSE,
            log=log,
        )

    def _host_tier(self, model: ModelCosts, extra_tokens: int) -> HostTier:
        case, bytes_per_token = self.case, model.kv_bytes_per_token
        if case.host_bytes is None:
            state = state_blocks(model)
            blocks = sum(s.host_blocks(BLOCK_TOKENS, extra_tokens, state) for s in self.scripts)
            num_bytes = blocks * BLOCK_TOKENS * bytes_per_token
        else:  # shared by KV bytes per token, as the device's
            verifier = 0 if case.verifier is None else case.verifier.model.kv_bytes_per_token
            total = case.model.kv_bytes_per_token + verifier
            num_bytes = case.host_bytes * bytes_per_token // total
        hint = "raise --host-memory, or use --evict recompute"
        ledger = _ledger(model, ByteBudget(num_bytes, "host KV budget", hint))
        schedule = case.schedule
        recompute = schedule.evict == "recompute"
        return TIERS[case.victims](ledger, self.link, recompute, schedule.inter_beam)

    def _most_bytes(self) -> int | None:
        """How far a budget can grow; None where it stays."""
        case = self.case
        if case.split is None or case.verifier is None:
            return None
        return case.kv_budget_bytes + case.verifier.kv_budget_bytes

    def _make_moving(self) -> MovingSplit | None:
        """What moves memory between the two models; None where nothing does."""
        case = self.case
        if case.verifier is None or not self.scorers or self.residency is None:
            return None
        if case.hardware is None or case.split is None or case.overlap:
            return None
        costs = case.model, case.verifier.model
        longest = case.step.step_tokens or case.step.max_step_tokens
        return moving_split(
            case.split,
            costs,
            case.hardware,
            (self.residency, self.scorers[0]),
            longest,
            scores_early=case.speculation != "off",
        )

    def _stalled_s(self) -> float:
        """Seconds in which compute waited for the link, the verifier's included."""
        stall_s = 0.0 if self.layerwise is None else self.layerwise.stall_s
        held = (self.residency, *self.scorers)
        return stall_s + sum(each.counts.transfer_wait_s for each in held if each is not None)


def state_blocks(model: ModelCosts) -> int:
    """Blocks of a row's state."""
    return -(-model.state_bytes // (BLOCK_TOKENS * model.kv_bytes_per_token))


def _ledger(model: ModelCosts, budget: ByteBudget, most_bytes: int | None = None) -> BlockLedger:
    """A model's blocks: KV's, and behind it those of states."""
    groups, fixed = [GroupBlocks(BLOCK_TOKENS)], state_blocks(model)
    if fixed:
        groups.append(GroupBlocks.of_states(fixed))
    return BlockLedger(model.kv_bytes_per_token, BLOCK_TOKENS, budget, most_bytes, groups)


def _last(scores: Sequence[float | None]) -> float | None:
    return scores[-1]


def _clock(case: Simulation) -> VirtualClock:
    """The clock of a device on which one thing runs at a time, or two."""
    return SharedClock() if case.overlap else VirtualClock()


def seconds_of(bench: Bench) -> Seconds:
    """Where the time has gone."""
    clock, counts = bench.clock, bench.accounting.counts
    stall_s, verify_s, both_s = counts.stall_s, counts.verify_s, 0.0
    if isinstance(clock, SharedClock):
        stall_s = max(0.0, stall_s - clock.hidden_s)
        verify_s, both_s = clock.beside_s, clock.both_s
    decode_s = clock.now_s - verify_s - both_s - stall_s
    return Seconds(clock.now_s, decode_s, verify_s, both_s, stall_s)
