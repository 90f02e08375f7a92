"""Problems spread over Ray's actors: an engine in each, work that is taken and not dealt.

With `--in-flight auto` the driver gives every replica a few problems more than it begins, and it
gives another one whenever one has ended. Where nothing is left to give, whoever has nothing takes
what others have not begun. A replica that dies has its problems solved by others, each of them
once.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from beamwright.cluster.cluster import Cluster
from beamwright.cluster.ray_cluster import RayCluster, last_line
from beamwright.cluster.replica import FarError, FarSolution, Replica, WholeSolution
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, UnavailableError
from beamwright.evaluate.run import InFlight, Solved
from beamwright.solver.solution import Solution

MOST_DEATHS = 3
"""Of a problem's replica, before the run ends: it is presumably the problem that kills them."""

_WAIT_S = 1.0
_ABSENT_S = 60.0
"""That no replica is there before the run ends, or twice as long as the first ones took to load."""

_CANDIDATES = 256
"""Paths that a replica is given at a time, begun or not."""

_CANDIDATES_DECOUPLED = 1024
"""The same where an engine begins as many as its passes have room for."""

Problem = tuple[str | int, str] | tuple[str | int, str, dict[str, Any]]
"""Its id, its text, and options of its own."""


@dataclass(eq=False)
class _Worker:
    """A replica's actor, and the problems that it was given."""

    actor: Any
    given: dict[Any, Problem] = field(default_factory=dict)


class RaySolving:
    """A `SolveMany` over a cluster. Use as a context: it ends what it has begun.

    whole: solutions come with their trees.
    """

    def __init__(self, settings: Settings, cluster: Cluster, *, whole: bool = False) -> None:
        self._settings, self._whole = settings, whole
        self._cluster = RayCluster(cluster, settings.model)
        self._ray = self._cluster.ray
        self._workers: list[_Worker] = []
        self._coming: dict[Any, _Worker] = {}
        self._failed_starts = 0
        self._loading_s = self._there_s = 0.0
        self._deaths: Counter[str | int] = Counter()

    def __enter__(self) -> RaySolving:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in (*self._workers, *self._coming.values()):
            self._ray.kill(worker.actor)
        self._cluster.leave()

    def __call__(
        self, problems: Sequence[Problem], /, *, in_flight: InFlight
    ) -> Iterator[tuple[str | int, Solved | BeamwrightError]]:
        """Solutions as they finish, see `evaluate.SolveMany`. in_flight: in each replica.

        Raises:
            BeamwrightError: if replicas keep dying, or cannot be made; UnavailableError: if none is
                there any more, and none comes.
        """
        most = self._most_given(in_flight)
        self._start(in_flight, most)
        queue = deque(problems)
        while queue or any(worker.given for worker in self._workers):
            self._hand_out(queue, most)
            owners = {ref: worker for worker in self._workers for ref in worker.given}
            ready, _ = self._ray.wait([*owners, *self._coming], timeout=_WAIT_S)
            self._look(idle=not ready)
            for ref in ready:
                if ref in self._coming:
                    self._arrived(ref)
                elif ref in owners[ref].given:  # a worker that died is already without
                    yield from self._taken(owners[ref], ref, queue)

    def _look(self, *, idle: bool) -> None:
        """Raises UnavailableError if nobody is there, and nobody will come."""
        now = time.monotonic()
        if self._workers:
            self._there_s = now
        absent_s = now - self._there_s
        if absent_s > max(_ABSENT_S, 2 * self._loading_s):
            raise UnavailableError(f"--ray: no replica has been there for {absent_s:.0f} s")
        if idle and not any(node["Alive"] for node in self._ray.nodes()):
            raise UnavailableError("--ray: all nodes of the cluster are dead")

    # --- who has what ------------------------------------------------------------------------

    def _hand_out(self, queue: deque[Problem], most: int) -> None:
        """Everybody gets one after the other; with nothing left, the idle take from the rest."""
        while queue and self._workers:
            worker = min(self._workers, key=lambda each: len(each.given))
            if len(worker.given) >= most:
                return
            problem = queue.popleft()
            worker.given[worker.actor.solve.remote(*problem, whole=self._whole)] = problem
        if any(not worker.given for worker in self._workers):
            busiest = max(self._workers, key=lambda each: len(each.given))
            if len(busiest.given) > 1:
                # What comes back returns as None through its `solve`.
                busiest.actor.give_back.remote(len(busiest.given) // 2)

    def _taken(
        self, worker: _Worker, ref: Any, queue: deque[Problem]
    ) -> Iterator[tuple[str | int, Solved | BeamwrightError]]:
        errors = self._ray.exceptions
        try:
            outcome = self._ray.get(ref)
        except (errors.RayActorError, errors.ObjectLostError) as error:
            self._replace(worker, queue, error)
            return
        except errors.RayTaskError as error:
            raise BeamwrightError(f"a replica failed: {last_line(error)}") from error
        problem = worker.given.pop(ref)
        if outcome is None:
            queue.append(problem)
        else:
            yield problem[0], _arrived_here(outcome)

    def _replace(self, worker: _Worker, queue: deque[Problem], error: Exception) -> None:
        """Somebody else solves what it had; what it had finished has been taken before."""
        lost = list(worker.given.values())
        self._deaths.update(problem[0] for problem in lost)
        for problem_id, count in self._deaths.items():
            if count >= MOST_DEATHS:
                raise BeamwrightError(
                    f"problem {problem_id}: {count} replicas died while they had it: "
                    f"{last_line(error)}"
                ) from error
        queue.extendleft(reversed(lost))
        self._workers.remove(worker)
        self._ray.kill(worker.actor)  # it may be there, and its node's objects not
        self._come()

    def _come(self) -> None:
        """Another replica, as soon as there is a place for it."""
        worker = self._worker()
        self._coming[worker.actor.ready.remote()] = worker

    def _arrived(self, ref: Any) -> None:
        """It has loaded its models, or died of it."""
        worker = self._coming.pop(ref)
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            self._failed_starts += 1
            if self._failed_starts < MOST_DEATHS:
                self._come()
            elif not self._workers and not self._coming:  # else those that are there go on
                raise BeamwrightError(f"replicas cannot be started: {last_line(error)}") from error
            return
        self._failed_starts = 0
        self._workers.append(worker)

    # --- replicas ----------------------------------------------------------------------------

    def _start(self, in_flight: InFlight, most: int) -> None:
        self._cluster.join()
        self._in_flight = None if in_flight == "auto" else in_flight
        self._concurrency = most + 1  # and one that gives back
        if not self._workers:
            self._workers = [self._worker() for _ in range(self._cluster.num_replicas())]
            self._wait_until_loaded()

    def _worker(self) -> _Worker:
        make = self._ray.remote(Replica).options(
            max_concurrency=self._concurrency, **self._cluster.needs
        )
        settings = self._settings.model_dump(mode="json", exclude_unset=True)
        return _Worker(make.remote(settings, self._cluster.wanted.plugins, self._in_flight))

    def _wait_until_loaded(self) -> None:
        """Raises what is wrong with the settings, of the first replica that says so."""
        begun_s = time.monotonic()
        refs = [worker.actor.ready.remote() for worker in self._workers]
        while refs:
            ready, refs = self._ray.wait(refs, timeout=_WAIT_S)
            try:
                self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                why = last_line(error)
                raise BeamwrightError(f"a replica could not be started: {why}") from error
            self._look(idle=not ready)
        self._loading_s = time.monotonic() - begun_s

    def _most_given(self, in_flight: InFlight) -> int:
        """What is given beyond what is in flight waits there while others run dry."""
        if in_flight == "auto":
            decoupled = self._settings.schedule.explore == "decoupled"
            candidates = _CANDIDATES_DECOUPLED if decoupled else _CANDIDATES
            return max(2, -(-candidates // self._settings.search.n))
        return in_flight


def _arrived_here(outcome: FarSolution | WholeSolution | FarError) -> Solved | BeamwrightError:
    if isinstance(outcome, FarError):
        return outcome.error()
    return outcome.solution() if isinstance(outcome, WholeSolution) else outcome


class OnRay(Cluster):
    """Where `Solver.solve_many(ray=OnRay(...))` has its problems solved.

    Solutions are whole, with their trees, and those of one process.
    """

    def __call__(
        self, settings: Settings, problems: Sequence[Problem], in_flight: int | None, /
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """As they end; see `solver.spread.Spreads`."""
        with RaySolving(settings, self, whole=True) as spread:
            for problem_id, outcome in spread(problems, in_flight=in_flight or "auto"):
                assert isinstance(outcome, Solution | BeamwrightError)
                yield problem_id, outcome
