"""Bench: assemble a simulated engine and run searches on it.

The verifier scores between decoding iterations, or concurrently with them (`simulator.lanes`).
Without a verifier, scoring takes no time. Selection and pruning never take time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from beamwright.counters import Progress
from beamwright.engine.admission import TreeAdmission
from beamwright.engine.batch import RunningBatch
from beamwright.engine.capacity import BatchSizeLimit, RowManager
from beamwright.engine.engine import Engine
from beamwright.engine.executor import STEPS_TOGETHER, Executor, VerifierLane
from beamwright.engine.row import DecodingSettings, TreeDecodingSettings
from beamwright.engine.scoring import VerifierCaller
from beamwright.engine.speculation import Payoff
from beamwright.engine.split import KVBudgetSplit
from beamwright.engine.timeline import PhaseTimer, Timeline
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError
from beamwright.kv.host import HostTier
from beamwright.kv.pool import BlockLedger, BlockSpec, ByteBudget
from beamwright.models.prefill import PrefillRequest, record_source
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.fits import MARK_TOKENS
from beamwright.plan.machines import HardwareProfile, PassCosts
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.protocols import Foresees, StepWriter, Verifier
from beamwright.schedule import make_schedule, schedule_entry
from beamwright.sections import ScheduleSettings, Speculation, StepSettings
from beamwright_lab.baselines.layerwise.declare import streams_layers
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.lanes import LanedExecutor, QueueClock, SharedClock
from beamwright_lab.simulator.layerwise import SimulatedLayerwise
from beamwright_lab.simulator.link import VirtualLink
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.replay import ReplayStrategy, ReplayVerifier, Scripts
from beamwright_lab.simulator.residency import SimulatedPrefill, SimulatedResidency
from beamwright_lab.simulator.scripted_rows import Moments, ScriptedRows
from beamwright_lab.simulator.split import moving_split
from beamwright_lab.simulator.verifier import SimulatedVerifier, VerifierCase
from beamwright_lab.simulator.victims import TIERS, Victims

_TAIL_TOKENS = {Layout.DENSE: 64, Layout.TREE: 256}  # as in package `attention`
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Simulation:
    """One search to simulate: tree, model, machine, memory and schedule.

    model, costs: the generator, and the times of its operations.
    kv_budget_bytes: device memory for the generator's KV.
    step: limits of step lengths that the schedule knows.
    context: context length of the model, in tokens.
    host_bytes: host memory for KV of both models; None: unlimited.
    verifier: None: scoring takes no time.
    split: how memory moves between the models' KV budgets during the search (see
        `simulator.split.moving_split`); None: budgets are fixed.
    hardware: machine from which the schedule, and the split "roofline", estimate times.
    speculation: overrides the schedule's setting, whose default depends on measured times.
    victims: order in which KV is evicted, see `simulator.victims`.
    foresees: predicts which steps selection will extend, see `ReplayStrategy`.
    overlap: the verifier scores concurrently with decoding; budgets are then fixed.
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
    """Time of a simulation by phase: time_s = decode_s + verify_s + both_s + stall_s.

    decode_s: only the generator computes, prefills included.
    verify_s: only the verifier computes.
    both_s: both compute.
    stall_s: computation waits for the link.
    """

    time_s: float
    decode_s: float
    verify_s: float
    both_s: float
    stall_s: float


class Bench:
    """A simulated engine with generator, verifier, KV stores, link and clock.

    cases: the searches. Everything but tree and foresight is taken from the first one.
    moments: filled as described in `scripted_rows`.
    progress: is told about rounds and tokens.
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
        self.case, self.clock, self.moments = case, clock or _make_clock(case), moments
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
        self.phase_timer = PhaseTimer(self.clock, counts)
        executor = self._make_executor(timeline)
        schedule = make_schedule(case.schedule)
        self._payoff = Payoff()
        self._engine = Engine(
            executor,
            schedule,
            self.phase_timer,
            self.clock,
            self._payoff,
            explore=case.schedule.explore,
            verify_ahead=case.schedule.verify_ahead == "slack",
        )
        self.moving = self._make_moving()

    # --- trees -------------------------------------------------------------------------------

    def run(self, in_flight: int | None) -> list[TreeRun]:
        """Run all searches to their end, admitted in order by `engine.admission`.

        A search that does not fit beside others is run again alone after all others.

        in_flight: most searches at a time; None: as many as the generator has work for.

        Raises:
            CapacityError: if a search does not fit alone.
        """
        runs = self._run_trees(range(len(self._cases)), in_flight)
        if in_flight != 1:
            short = [i for i, run in runs.items() if isinstance(run.error, CapacityError)]
            runs |= self._run_trees(short, 1)
        for run in runs.values():
            if run.error is not None:
                raise run.error
        return list(runs.values())

    def _run_trees(self, numbers: Sequence[int], in_flight: int | None) -> dict[int, TreeRun]:
        """Run these searches once, by index. A search that did not fit has a `TreeRun.error`."""
        engine, scripts = self._engine, list(self.scripts)
        stores = [each for each in (self.residency, *self.scorers) if each is not None]
        admission = TreeAdmission(self.case.schedule, in_flight, stores, clock=self.clock)
        runs: dict[int, TreeRun] = {}
        waiting = deque(numbers)

        def has_room() -> bool:
            live = {run: scripts[i].num_beams for i, run in runs.items() if not run.tree.done}
            return admission.has_room(live, engine.num_open)

        try:
            while waiting or engine.num_live:
                while waiting and has_room():
                    i = waiting.popleft()
                    strategy = ReplayStrategy(scripts[i], self._cases[i].foresees)
                    tree = scripts[i].search_tree()
                    runs[i] = TreeRun(
                        tree,
                        strategy,
                        _last_score,
                        lambda tree: Random(0),
                        render_turn=scripts[i].render_turn,
                    )
                    engine.admit(runs[i])
                if self.moving is not None:
                    self.moving.rebalance([run for run in runs.values() if not run.tree.done])
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
        self.residency = self._make_residency(case.model, case.costs, self.budget, 0, timeline)
        rows = ScriptedRows(
            self.residency, self.clock, case.costs, self.scripts, tail_tokens, self.moments
        )
        settings = case.schedule.model_copy(update={"speculation": case.speculation})
        decodings = TreeDecodingSettings(DecodingSettings(step=case.step))
        prefill = self._make_prefill(self.residency, case.costs)
        self.batch = RunningBatch(
            rows,
            self.residency,
            prefill,
            RowManager(self.residency, decodings, case.context),
            settings,
            BatchSizeLimit(costs=self._pass_costs()),
            progress=self._progress,
        )
        return self.batch

    def _pass_costs(self) -> PassCosts | None:
        """Return the schedule's estimates, of `hardware` if set, else of the simulated machine."""
        case, roofline = self.case, getattr(self.case.costs, "roofline", None)
        if case.hardware is not None:
            roofline = Roofline(case.model, case.hardware)
        return None if roofline is None else roofline.pass_costs()

    def _make_prefill(
        self, residency: SimulatedResidency, costs: RooflineCosts
    ) -> Callable[[Sequence[PrefillRequest]], list[bool]]:
        prefill, recomputes = SimulatedPrefill(residency, self.clock, costs), False
        if residency.host is not None:
            recomputes = residency.host.recompute

        def run(requests: Sequence[PrefillRequest]) -> list[bool]:
            prefill.run(requests)
            if recomputes:
                for request in requests:
                    record_source(request, request.token_ids)
            return [True] * len(requests)

        return run

    def _make_executor(self, timeline: Timeline | None) -> Executor:
        most_steps = STEPS_TOGETHER[self.case.schedule.explore]
        if isinstance(self.clock, SharedClock) and self.case.verifier is not None:
            lanes = []
            for copy in range(self.case.verifier.copies):
                queue = QueueClock(self.clock, copy + 1 if self.case.verifier.own_cards else 0)
                lanes.append((self._make_verifier(queue), queue))
            return LanedExecutor(
                self._writer,
                lanes,
                self.phase_timer,
                self.clock,
                self._stalled_s,
                most_steps=most_steps,
            )
        verifier = self._make_verifier(self.clock)
        scoring = VerifierCaller(verifier, self.phase_timer, self._stalled_s, timeline, most_steps)
        lane = VerifierLane(scoring, self._progress)
        return Executor(self._writer, [lane], self._stalled_s, self._progress)

    def _make_verifier(self, clock: VirtualClock) -> Verifier:
        found = self.case.verifier
        if found is None:
            return ReplayVerifier(self.scripts)
        budget = ByteBudget(found.kv_budget_bytes, "device KV budget of the verifier")
        scorer = self._make_residency(found.model, found.costs, budget, MARK_TOKENS, clock=clock)
        prefill = SimulatedPrefill(scorer, clock, found.costs)
        self.scorers.append(scorer)
        self.verifiers.append(SimulatedVerifier(scorer, prefill, self.scripts))
        return self.verifiers[-1]

    def _make_residency(
        self,
        model: ModelCosts,
        costs: RooflineCosts,
        budget: ByteBudget,
        extra_tokens: int,
        log: Timeline | None = None,
        clock: VirtualClock | None = None,
    ) -> SimulatedResidency:
        """Create one model's KV store. Its steps have `extra_tokens` more than the scripts'."""
        host = None
        if not schedule_entry(self.case.schedule).resident:
            host = self._make_host_tier(model, extra_tokens)
        return SimulatedResidency(
            _make_ledger(model, budget, self._largest_budget_bytes()),
            host,
            clock or self.clock,
            costs,
            copies_per_beam=costs.layout is Layout.DENSE,
            log=log,
        )

    def _make_host_tier(self, model: ModelCosts, extra_tokens: int) -> HostTier:
        case, bytes_per_token = self.case, model.kv_bytes_per_token
        if case.host_bytes is None:
            state = state_blocks(model)
            blocks = sum(s.host_blocks(BLOCK_TOKENS, extra_tokens, state) for s in self.scripts)
            num_bytes = blocks * BLOCK_TOKENS * bytes_per_token
        else:  # divided between the models in proportion to their KV bytes per token
            verifier = 0 if case.verifier is None else case.verifier.model.kv_bytes_per_token
            total = case.model.kv_bytes_per_token + verifier
            num_bytes = case.host_bytes * bytes_per_token // total
        hint = "raise --host-memory, or use --evict recompute"
        ledger = _make_ledger(model, ByteBudget(num_bytes, "host KV budget", hint))
        schedule = case.schedule
        recompute = schedule.evict == "recompute"
        return TIERS[case.victims](ledger, self.link, recompute, schedule.inter_beam)

    def _largest_budget_bytes(self) -> int | None:
        """Return the largest budget that a model may get; None if budgets are fixed."""
        case = self.case
        if case.split is None or case.verifier is None:
            return None
        return case.kv_budget_bytes + case.verifier.kv_budget_bytes

    def _make_moving(self) -> KVBudgetSplit | None:
        """Create the split that moves memory; None if budgets are fixed."""
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
        """Return the seconds in which either model waited for the link."""
        stall_s = 0.0 if self.layerwise is None else self.layerwise.stall_s
        held = (self.residency, *self.scorers)
        return stall_s + sum(each.counts.transfer_wait_s for each in held if each is not None)


def state_blocks(model: ModelCosts) -> int:
    """Return the blocks that one row's recurrent states take."""
    return -(-model.state_bytes // (BLOCK_TOKENS * model.kv_bytes_per_token))


def _make_ledger(
    model: ModelCosts, budget: ByteBudget, most_bytes: int | None = None
) -> BlockLedger:
    """Create the ledger of a model's blocks; recurrent states have a group of their own."""
    groups, fixed = [BlockSpec(BLOCK_TOKENS)], state_blocks(model)
    if fixed:
        groups.append(BlockSpec.of_states(fixed))
    return BlockLedger(model.kv_bytes_per_token, BLOCK_TOKENS, budget, most_bytes, groups)


def _last_score(scores: Sequence[float | None]) -> float | None:
    return scores[-1]


def _make_clock(case: Simulation) -> VirtualClock:
    """Create the clock; with overlap, one on which two models can compute at a time."""
    return SharedClock() if case.overlap else VirtualClock()


def phase_seconds(bench: Bench) -> Seconds:
    clock, counts = bench.clock, bench.phase_timer.counts
    stall_s, verify_s, both_s = counts.stall_s, counts.verify_s, 0.0
    if isinstance(clock, SharedClock):
        stall_s = max(0.0, stall_s - clock.hidden_s)
        verify_s, both_s = clock.beside_s, clock.both_s
    decode_s = clock.now_s - verify_s - both_s - stall_s
    return Seconds(clock.now_s, decode_s, verify_s, both_s, stall_s)
