"""RequestScheduler: admit a solver's requests to the engine, and return their outcomes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from beamwright.engine.admission import REMOTE_ROWS, USUAL_ROWS, TreeAdmission
from beamwright.engine.decisions import StopRule
from beamwright.engine.engine import Engine
from beamwright.engine.executor import PATIENCE_S, has_own_thread, make_executor
from beamwright.engine.scoring import VerifyEveryRule
from beamwright.engine.tree_run import RenderTurn, TreeRun
from beamwright.errors import (
    DEVICE_TIER,
    BeamwrightError,
    Cancelled,
    CapacityError,
    DeviceMemoryError,
    InputError,
    Interrupted,
    LinkError,
)
from beamwright.models.load import check_device
from beamwright.protocols import SchedulePolicy, traits_of
from beamwright.search import round_rng
from beamwright.search.answers import make_answers
from beamwright.solver.machinery import Machinery
from beamwright.solver.memory import memory_advice
from beamwright.solver.request import Request
from beamwright.solver.solution import Solution
from beamwright.solver.solution_maker import SolutionMaker, complete_nodes, final_nodes
from beamwright.verify.spec import aggregate

Outcome = Solution | BeamwrightError


# Source of requests. `arrivals(has_room, is_idle)` returns the next request, or None if no request
# may start. If `has_room` is False, no further search fits, and only a request that scores given
# steps may start. If `is_idle` is True, returning None ends the scheduler's run.
Arrivals = Callable[[bool, bool], Request | None]


def arrivals_of(requests: Iterable[Request]) -> Arrivals:
    """Make `Arrivals` from a list of requests.

    A larger priority comes first; requests of equal priority keep their order.
    """
    ordered = iter(sorted(requests, key=lambda request: -request.priority))
    return lambda has_room, _: next(ordered, None) if has_room else None


class RequestScheduler:
    """Runs requests concurrently, and yields each request with its solution or its own error.

    A request whose KV did not fit next to others is tried again alone. In this second try, with
    `--executor auto`, generator and verifier run in turns, so that they can share memory.
    """

    def __init__(
        self,
        machinery: Machinery,
        schedule: SchedulePolicy,
        turn: RenderTurn,
        in_flight: int | None = None,
    ) -> None:
        """turn: renders a further user message of a conversation.
        in_flight: maximum number of searches at once; None: as many as keep the device busy.
        """
        self._machinery, self._schedule, self._turn = machinery, schedule, turn
        stores = [model.store for model in machinery.tree_models]
        for store in stores:
            store.reset_peaks()
        if machinery.shared is not None:
            machinery.shared.reset_peak()
        self._maker = SolutionMaker(machinery, schedule)
        self._engine = self._make_engine(in_flight)
        rows = USUAL_ROWS if machinery.remote is None else REMOTE_ROWS
        schedule_settings = machinery.settings.schedule
        self._admission = TreeAdmission(schedule_settings, in_flight, stores, rows)
        if machinery.moving is not None:
            machinery.moving.restart()
        self._live: dict[TreeRun, Request] = {}
        self._alone: deque[Request] = deque()
        self._ended: deque[tuple[Request, Outcome]] = deque()

    def _make_engine(self, in_flight: int | None) -> Engine:
        """Return an engine for at most `in_flight` problems at once."""
        machinery, settings = self._machinery, self._machinery.settings.schedule
        models, verifier = (machinery.generator, *machinery.scorers), machinery.verifier
        exact, threads = machinery.exact, machinery.threads.count
        beside = has_own_thread(
            settings, verifier, models, in_flight=in_flight, exact=exact, num_threads=threads
        )
        phase_timer, shown = self._maker.phase_timer, (machinery.timeline, machinery.progress)
        parts = machinery.batch, machinery.verifiers, phase_timer, models
        executor = make_executor(settings, *parts, *shown, beside=beside)
        # If the verifier runs on its own thread, memory is not moved between the models, because
        # only that thread may use the verifier's store.
        self._maker.moving = None if beside else machinery.moving
        return Engine(
            executor,
            self._schedule,
            phase_timer,
            payoff=machinery.payoff,
            explore=settings.explore,
            verify_ahead=settings.verify_ahead == "slack",
            listwise=traits_of(verifier).listwise,
            truncation=settings.truncation,
            steps_patience_s=PATIENCE_S if machinery.remote is not None else None,
        )

    @property
    def _may_take_turns(self) -> bool:
        """True if the models run concurrently, but could run in turns and share their memory."""
        machinery = self._machinery
        fixed = machinery.moving is not None and self._maker.moving is None
        return fixed and machinery.settings.schedule.executor == "auto"

    def run(self, arrivals: Arrivals) -> Iterator[tuple[Request, Outcome]]:
        """Yield each request with its outcome when it ends.

        Raises:
            LinkError: if the link fails.
            Interrupted: on Ctrl-C. If only one tree was in flight, `partial` of either error has
                the tree's finished candidates.
        """
        machinery = self._machinery
        # Kernels are launched on the thread's current GPU, which in a new thread is the first GPU.
        # This call selects the GPU of `--device`.
        check_device(machinery.settings.model.device)
        try:
            while True:
                with machinery.threads.in_use():
                    self._admit(arrivals)
                    self._cancel()
                    if self._live and not self._ended:
                        if self._maker.moving is not None:
                            self._maker.moving.rebalance(self._live)
                        self._record_outcomes(self._engine.step())
                if not (self._live or self._ended or self._alone):
                    return
                while self._ended:
                    yield self._ended.popleft()
        except (BeamwrightError, KeyboardInterrupt) as error:
            self._engine.abort()
            stopped = self._make_error(error, self._live)
            if stopped is error:
                raise
            raise stopped from error
        finally:
            self._engine.abort()
            if self._live:
                machinery.batch.abort()

    # --- admission ---------------------------------------------------------------------------

    def _admit(self, arrivals: Arrivals) -> None:
        """Admit requests from `arrivals` while further searches fit.

        A request that is tried again alone waits until no other request runs.
        """
        while not self._ended:
            if self._alone:
                request = None if self._live else self._alone.popleft()
                if request is not None and self._may_take_turns:
                    self._engine.abort()
                    self._engine = self._make_engine(1)
            else:
                live = self._live.items()
                drawn = {run: each.problem.settings.search.n for run, each in live if each.draws}
                has_room = self._admission.has_room(drawn, self._engine.num_open)
                request = arrivals(has_room, not live)
            if request is None:
                return
            self._begin(request)

    def _begin(self, request: Request) -> None:
        """Start the search of a request, or end it if it is cancelled or invalid."""
        machinery, problem = self._machinery, request.problem
        if request.cancelled:
            self._ended.append((request, Cancelled()))
            return
        request.begun = True
        search = problem.settings.search
        try:
            judges, tree = (
                VerifyEveryRule.for_verifier(machinery.verifier, search.verify_every),
                request.make_tree(),
            )
            machinery.batch.set_decoding(tree.root, problem.decoding(judges.sees))
            known = search.model_extra or {}, tree.root.problem_text
            answers = make_answers(search.answers, *known)
        except InputError as error:
            self._ended.append((request, error))
            return
        run = TreeRun(
            tree,
            problem.strategy,
            partial(aggregate, how=search.aggregate or machinery.verifier.default_aggregate),
            partial(round_rng, search),
            judges,
            self._turn,
            on_round=request.on_round,
            rule=StopRule(problem.settings.stop, search, problem.parts.stops),
            answers=answers,
            priority=request.priority,
            waited_s=request.waited_s,
            save=request.save,
        )
        if request.prepare is not None:
            request.prepare(run)
        self._live[run], request.since = request, self._maker.read_counters()
        for other in self._live.values():
            other.ran_with_others |= len(self._live) > 1
        self._record_outcomes(self._engine.admit(run))

    # --- outcomes ----------------------------------------------------------------------------

    def _cancel(self) -> None:
        """End the searches whose requests were cancelled."""
        for run in [run for run, request in self._live.items() if request.cancelled]:
            self._engine.cancel(run)
            run.error = Cancelled()
            self._record_outcomes([run])

    def _record_outcomes(self, ended: Sequence[TreeRun]) -> None:
        """Record the solution or error of each ended tree.

        A tree whose KV did not fit next to others is queued to run alone.
        """
        for run in ended:
            request = self._live.pop(run)
            too_large = isinstance(run.error, CapacityError | DeviceMemoryError)
            if too_large and (request.ran_with_others or self._may_take_turns):
                request.ran_with_others = False
                self._alone.append(request)
            elif run.error is not None:
                self._make_error(run.error, {run: request})
                self._ended.append((request, run.error))
            else:
                solution = self._maker.make_solution(run, request)
                if request.save is not None:
                    chosen = ".".join(map(str, solution.lineage[1:]))
                    said = {"reason_fewer": solution.reason_fewer, "receipt": solution.receipt}
                    request.save.end(answer=solution.answer, chosen=chosen, **said)
                self._ended.append((request, solution))

    def _make_error(
        self, error: BeamwrightError | KeyboardInterrupt, ended: Mapping[TreeRun, Request]
    ) -> BeamwrightError | Interrupted:
        """Add advice, and the candidates so far (`partial`), to an error that ended these trees.

        `partial` is set if exactly one tree ended. If the user stopped the search before any path
        was finished, it contains unfinished paths.
        """
        machinery = self._machinery
        stopped = error if isinstance(error, BeamwrightError) else Interrupted()
        if isinstance(error, LinkError):
            machinery.stop_threads()  # the next problem starts new threads in place of a dead one
        if isinstance(error, CapacityError) and error.tier == DEVICE_TIER and ended:
            request, kv_bytes = next(iter(ended.values())), machinery.plan.kv_bytes
            most = max(len(run.tree.root.token_ids) for run in ended)
            known = request.problem.settings, kv_bytes, machinery.sizes, most
            error.hint = memory_advice(self._schedule.name, *known)
            if not request.draws:
                error.hint = "raise --memory or --kv-memory, or give fewer paths at a time"
        if len(ended) == 1:
            ((run, request),) = ended.items()
            run.tree.reason_fewer = str(error) or "interrupted"
            nodes = complete_nodes(run.tree)
            if not nodes and isinstance(stopped, Interrupted | Cancelled):
                nodes = final_nodes(run.tree, request.problem.settings.search.n)
            if nodes:
                stopped.partial = self._maker.make_solution(run, request, nodes)
        return stopped
