"""Flights: the problems that a solver works on at a time, each from its request to its outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from beamwright.counters import Counters
from beamwright.engine.admission import REMOTE_ROWS, USUAL_ROWS, Admission
from beamwright.engine.concurrency import overlaps
from beamwright.engine.engine import Engine
from beamwright.engine.executor import PATIENCE_S, make_executor
from beamwright.engine.moving import MovingSplit
from beamwright.engine.timeline import Accounting
from beamwright.engine.tree_run import RenderTurn, TreeRun
from beamwright.errors import (
    BeamwrightError,
    Cancelled,
    CapacityError,
    DeviceMemoryError,
    InputError,
    Interrupted,
    LinkError,
)
from beamwright.protocols import RoundCallback, SchedulePolicy
from beamwright.saved.checkpoint import CheckpointWriter
from beamwright.search import round_rng
from beamwright.solver.assembly import Machinery
from beamwright.solver.describe import describe, with_partial
from beamwright.solver.facts import Mark, Meter, RunFacts
from beamwright.solver.memory import advise
from beamwright.solver.own import Request
from beamwright.solver.solution import Solution
from beamwright.tree import SearchTree
from beamwright.verify.spec import aggregate

Outcome = Solution | BeamwrightError


@dataclass(eq=False)
class Flight:
    """One problem on its way.

    make_tree: called once more where the tree did not fit beside others.
    save: of a tree's `TreeRun`, from what is measured of it. resume: makes a run go on where an
    earlier process was, and says what that has measured.
    priority: a larger one goes first. asked_s: when it was submitted, on `time.perf_counter`: what
    its deadline counts from; None: from where its search starts.
    begun: it is, or was, in flight. cancelled: is to be given up; set by any thread.
    company: others were in flight beside it.
    """

    make_tree: Callable[[], SearchTree]
    request: Request
    on_round: RoundCallback | None = None
    save: Callable[[Callable[[], Counters]], CheckpointWriter] | None = None
    resume: Callable[[TreeRun], Counters] | None = None
    priority: int = 0
    asked_s: float | None = None
    begun: bool = False
    cancelled: bool = False
    company: bool = False

    @property
    def waited_s(self) -> float:
        """Seconds that its deadline counts so far; no more than all of them, so that scores still
        have the time that an executor gives them."""
        deadline_s = self.request.settings.stop.deadline
        if self.asked_s is None or deadline_s is None:
            return 0.0
        return min(deadline_s, time.perf_counter() - self.asked_s)


class Arrivals(Protocol):
    """Where flights come from."""

    def next(self, *, idle: bool) -> Flight | None:
        """The next one; None if there is none now.

        idle: nothing is in flight, so None ends the run.
        """
        ...


class Listed:
    """Flights that are known beforehand: a larger priority first, then in their order."""

    def __init__(self, flights: Iterable[Flight]) -> None:
        self._flights = iter(sorted(flights, key=lambda flight: -flight.priority))

    def next(self, *, idle: bool) -> Flight | None:
        """The next one, whether or not others are in flight."""
        del idle
        return next(self._flights, None)


@dataclass(eq=False)
class _Admitted:
    """A flight whose tree is in the engine. before: measured of it by earlier processes."""

    flight: Flight
    mark: Mark
    before: Counters | None


class Flights:
    """Runs problems to their outcomes. A problem's own error is its outcome; the others go on.

    One that did not fit beside others is tried once more, alone; from there on generator and
    verifier share their memory in turns, if `auto` may choose that.

    turn: renders what is asked again. in_flight: see `Admission`.
    """

    def __init__(
        self,
        machinery: Machinery,
        schedule: SchedulePolicy,
        turn: RenderTurn,
        in_flight: int | None = None,
    ) -> None:
        self._machinery, self._schedule = machinery, schedule
        self._turn = turn
        parts, self._accounting = machinery.parts, Accounting(counts=machinery.batch.counts)
        for model in parts.tree_models:
            model.store.reset_peaks()
        self._engine, self._moving, self._meter = self._made(in_flight)
        stores = [model.store for model in parts.tree_models]
        rows = USUAL_ROWS if parts.generator is not None else REMOTE_ROWS
        self._admission = Admission(machinery.settings, in_flight, stores, machinery.payoff, rows)
        if parts.moving is not None:
            parts.moving.restart()
        self._live: dict[TreeRun, _Admitted] = {}
        self._alone: deque[Flight] = deque()
        self._ended: deque[tuple[Flight, Outcome]] = deque()

    def _made(self, in_flight: int | None) -> tuple[Engine, MovingSplit | None, Meter]:
        """The engine for so many problems at a time, and what moves memory beside it."""
        machinery, accounting = self._machinery, self._accounting
        settings, parts = machinery.settings, machinery.parts
        models = (parts.generator, parts.scorer)
        beside = overlaps(
            settings,
            parts.verifier,
            models,
            in_flight=in_flight,
            exact=machinery.exact,
            num_threads=machinery.threads.count,
        )
        executor = make_executor(
            settings,
            machinery.batch,
            parts.verifier,
            accounting,
            models,
            machinery.timeline,
            machinery.progress,
            machinery.trial,
            beside=beside,
        )
        engine = Engine(
            executor,
            self._schedule,
            accounting,
            payoff=machinery.payoff,
            explore=settings.explore,
            verify_ahead=settings.verify_ahead == "slack",
            listwise=getattr(parts.verifier, "listwise", False),
            patience_s=PATIENCE_S if parts.generator is None else None,
        )
        # Beside a worker nothing moves: its thread alone may touch the verifier's store.
        moving = None if beside else parts.moving
        return engine, moving, Meter(machinery, self._schedule, accounting, moving)

    @property
    def _may_take_turns(self) -> bool:
        """True if both models have fixed parts because `auto` gave the verifier a thread."""
        moves = self._machinery.parts.moving is not None
        return moves and self._moving is None and self._machinery.settings.executor == "auto"

    def run(self, arrivals: Arrivals) -> Iterator[tuple[Flight, Outcome]]:
        """Yield each flight with its outcome as it ends.

        Raises:
            LinkError, Interrupted: with what was finished of a tree that was alone in flight.
        """
        machinery = self._machinery
        try:
            while True:
                with machinery.threads.in_use():
                    self._admit(arrivals)
                    self._cancel()
                    if self._live and not self._ended:
                        if self._moving is not None:
                            self._moving.look(self._live)
                        with machinery.payoff.noting(machinery.batch.counts):
                            self._note(self._engine.step())
                if not (self._live or self._ended or self._alone):
                    return
                while self._ended:
                    yield self._ended.popleft()
        except (BeamwrightError, KeyboardInterrupt) as error:
            found = [(run, self._facts(run)) for run in self._live]
            self._engine.abort()
            stopped = self._stopped(error, found)
            if stopped is error:
                raise
            raise stopped from error
        finally:
            self._engine.abort()
            if self._live:
                self._machinery.batch.abort()

    # --- who comes ---------------------------------------------------------------------------

    def _admit(self, arrivals: Arrivals) -> None:
        """Take in whoever there is a place for. Who has to be alone waits until all have gone."""
        while not self._ended:
            if self._alone:
                flight = None if self._live else self._alone.popleft()
                if flight is not None and self._may_take_turns:
                    self._engine.abort()
                    self._engine, self._moving, self._meter = self._made(1)
            elif self._is_full():
                flight = None
            else:
                flight = arrivals.next(idle=not self._live)
            if flight is None:
                return
            self._begin(flight)

    def _is_full(self) -> bool:
        sizes = {run: each.flight.request.settings.search.n for run, each in self._live.items()}
        return not self._admission.has_place(sizes, self._engine.num_open)

    def _begin(self, flight: Flight) -> None:
        machinery = self._machinery
        if flight.cancelled:
            self._ended.append((flight, Cancelled()))
            return
        flight.begun = True
        try:
            tree = flight.make_tree()
            machinery.batch.decode_as(tree.root, flight.request.decoding)
        except InputError as error:
            self._ended.append((flight, error))
            return
        search = flight.request.settings.search
        how = search.aggregate or machinery.parts.verifier.default_aggregate
        run = TreeRun(
            tree,
            flight.request.strategy,
            partial(aggregate, how=how),
            partial(round_rng, search),
            self._turn,
            on_round=flight.on_round,
            rule=flight.request.rule(),
            priority=flight.priority,
            waited_s=flight.waited_s,
        )
        before = None if flight.resume is None else flight.resume(run)
        self._live[run] = _Admitted(flight, self._meter.mark(), before)
        if flight.save is not None:
            run.save = flight.save(partial(self._meter.spent, self._live[run].mark, before))
        if len(self._live) > 1:
            for each in self._live.values():
                each.flight.company = True
        machinery.progress.began(tree.root.problem_id, search.n)
        self._note(self._engine.admit(run))

    # --- how they end ------------------------------------------------------------------------

    def _cancel(self) -> None:
        for run in [run for run, each in self._live.items() if each.flight.cancelled]:
            self._engine.cancel(run)
            run.error = Cancelled()
            self._note([run])

    def _note(self, ended: Sequence[TreeRun]) -> None:
        """These trees have ended: say how, or try again alone."""
        for run in ended:
            facts, flight = self._facts(run), self._live.pop(run).flight
            self._machinery.progress.ended(run.tree.root.problem_id)
            too_large = isinstance(run.error, CapacityError | DeviceMemoryError)
            if too_large and (flight.company or self._may_take_turns):
                flight.company = False
                self._alone.append(flight)
                continue
            outcome: Outcome = run.error or describe(run, facts)
            if run.error is not None:
                self._stopped(run.error, [(run, facts)])
            elif isinstance(outcome, Solution) and isinstance(run.save, CheckpointWriter):
                chosen = ".".join(map(str, outcome.lineage[1:]))
                why = outcome.reason_fewer
                run.save.end(answer=outcome.answer, chosen=chosen, reason_fewer=why)
            self._ended.append((flight, outcome))

    def _facts(self, run: TreeRun) -> RunFacts:
        each = self._live[run]
        settings = each.flight.request.settings
        return self._meter.facts(run, settings, each.mark, each.before)

    def _stopped(
        self, error: BeamwrightError | KeyboardInterrupt, found: Sequence[tuple[TreeRun, RunFacts]]
    ) -> BeamwrightError | Interrupted:
        """What is raised for an error that ended these trees."""
        machinery, parts = self._machinery, self._machinery.parts
        if found and parts.generator is not None:
            runs, settings = [run for run, _ in found], found[0][1].settings
            advise(
                error,
                self._schedule.name,
                settings,
                parts.plan,
                parts.tree_models,
                runs,
                in_turn=self._moving is not None,
            )
        if isinstance(error, LinkError):
            machinery.stop_threads()  # one that died starts afresh with the next problem
        return with_partial(error, found)
