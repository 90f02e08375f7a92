"""ClusterSolver: what a server or an evaluation needs of a Solver, over engines that Ray keeps.

A search goes to the replica with the fewest tokens to generate, and whoever listens hears what one
process would say. Of many problems a replica is given as many as it has in flight, and one more:
work is taken, not dealt.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from beamwright.cluster.front import Front, length
from beamwright.cluster.ledger import Given, Ledger, Tells
from beamwright.cluster.replica import EngineFacts
from beamwright.cluster.roster import ReplicaState, Roster
from beamwright.cluster.search import CANCEL_S, Outcome, RemoteSearch, Surroundings
from beamwright.cluster.serving import Cluster, RayServing
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.declare import load_all
from beamwright.engine.admission import USUAL_ROWS
from beamwright.errors import BeamwrightError, Cancelled, InputError, UnavailableError
from beamwright.progress import Progress
from beamwright.protocols import RoundCallback
from beamwright.solver.handle import Handle
from beamwright.solver.request import (
    BatchProblem,
    check_callback,
    check_problem,
    take_priority,
)
from beamwright.solver.solution import Solution
from beamwright.tree import Problem

PULSE_S = 2.0
_ABSENT_S = 60.0
"""That no replica is there before many problems end, or twice as long as they took to load."""

_DECOUPLED_ROWS = 1024
"""Candidates that a replica is given where its passes take as many as they have room for."""

_WAIT_S = 1.0


class ClusterSolver:
    """Engines elsewhere as one. Use as a context: it ends what it has begun.

    Raises:
        InputError, BeamwrightError: what a Solver with these settings would, or what Ray says.
    """

    @classmethod
    def on(
        cls,
        cluster: Cluster,
        settings: Settings,
        *,
        in_flight: int | None = None,
        progress: Progress | None = None,
    ) -> ClusterSolver:
        """Over replicas of a cluster. in_flight: in each, None for what keeps it busy."""
        load_all(cluster.plugins)
        serving = RayServing(cluster, settings, in_flight)
        return cls(settings, serving, in_flight=in_flight, progress=progress)

    def __init__(
        self,
        settings: Settings,
        serving: RayServing,
        *,
        in_flight: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        progress = progress or Progress()
        progress.doing("reading the tokenizer")
        self._front = front = Front(settings)
        self.settings, self.codec, self.context = front.settings, front.codec, front.context
        self.ledger, self._roster = Ledger(), Roster()
        self._in_flight = in_flight
        self._searches: dict[RemoteSearch, Handle] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._teller = ThreadPoolExecutor(1, "cluster rounds", self._note_teller)
        self._teller_is: int | None = None
        self._thread.start()
        progress.doing("starting replicas")
        self._serving, begun_s = serving, time.monotonic()
        self._around = Surroundings(serving, self.ledger, self._roster, self._teller)
        try:
            self.wanted = serving.start()
            self._facts: EngineFacts = serving.facts()
            self._loading_s = time.monotonic() - begun_s
            self._call(self._look()).result()
            self._call(self._look_on())
        except BaseException:
            self.close()
            raise
        self.exact = self._facts.exact

    def close(self) -> None:
        """Cancel what is submitted, and end the replicas."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            with suppress(TimeoutError):
                self._call(self._end()).result(CANCEL_S)
        self._serving.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._teller.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    def __enter__(self) -> ClusterSolver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- as a Solver -------------------------------------------------------------------------

    def prompt_tokens(self, problem: Problem) -> int:
        """Tokens of a problem's prompt, by any thread; raises what is wrong with it."""
        return self._front.prompt_tokens(problem)

    def submit(
        self,
        problem: Problem,
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        tells: Tells = "rounds",
        **options: Any,
    ) -> Handle:
        """Have a problem searched by a replica; as `Solver.submit`. tells: see `ledger`.

        on_round is called in a thread of this solver's, with a mirror of the tree.
        """
        check_problem(problem, problem_id)
        check_callback(on_round)
        options = {name: value for name, value in options.items() if value is not None}
        take_priority(wanted := dict(options))
        settings = self._front.requested(wanted, self._facts).settings
        n = settings.search.n
        tokens = self.ledger.expected(length(problem), n, settings.step.max_tokens)
        given = Given(uuid.uuid4().hex, problem, problem_id, options, tokens, self.ledger, tells)
        search = RemoteSearch(given, n, settings.stop.deadline, on_round, self._around)
        handle = Handle(problem_id, search, partial(self._withdraw, search), self._check_outside)
        self._loop.call_soon_threadsafe(self._begin, search, handle)
        return handle

    def solve(self, problem: Problem, **options: Any) -> Solution:
        """Submit it, and wait."""
        return self.submit(problem, **options).result()

    def solve_many(
        self, problems: Sequence[BatchProblem], *, tells: Tells = "nothing"
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """(id, outcome) as they end; a problem's own error is its outcome. tells: of solutions.

        Raises:
            BeamwrightError: for a bug in a replica;
            UnavailableError: if none is there any more, and none comes.
        """
        ended: SimpleQueue[Handle] = SimpleQueue()
        waiting, going = deque(problems), set[Handle]()
        try:
            while waiting or going:
                while waiting and len(going) < self._most_given():
                    problem_id, text, options = waiting.popleft()
                    handle = self.submit(text, problem_id=problem_id, tells=tells, **options)
                    going.add(handle)
                    self._call(_wait(handle, ended))
                try:
                    handle = ended.get(timeout=_WAIT_S)
                except Empty:
                    self._check_there()
                    continue
                going.remove(handle)
                try:
                    yield handle.problem_id, handle.result()
                except BeamwrightError as error:
                    yield handle.problem_id, error
                except RuntimeError as error:
                    raise BeamwrightError(f"a replica failed: {error}") from error
        finally:
            for handle in going:
                handle.cancel()

    def _withdraw(self, search: RemoteSearch) -> None:
        """Its handle says that it is cancelled."""
        self._loop.call_soon_threadsafe(search.give_up)

    def _check_outside(self) -> None:
        """Raises InputError in the thread that hears of rounds."""
        if threading.get_ident() == self._teller_is:
            raise InputError("a callback of a search cannot wait for one of the same ClusterSolver")

    # --- what there is -----------------------------------------------------------------------

    def usage(self) -> Usage:
        """Of all replicas together; counts of those that are gone included."""
        return self._roster.usage()

    @property
    def deaths(self) -> int:
        """Of replicas, so far."""
        return self._roster.deaths

    @property
    def restarts(self) -> int:
        """Of searches that had to begin again elsewhere."""
        return self._roster.restarts

    def replicas(self) -> list[ReplicaState]:
        """Those that are there, by their names."""
        return self._roster.states(self.ledger.loads())

    def _most_given(self) -> int:
        """Problems of many that are under way at a time, over all replicas that are there."""
        n, most = self.settings.search.n, self._in_flight
        if most is None:
            decoupled = self.settings.schedule.explore == "decoupled"
            most = -(-(_DECOUPLED_ROWS if decoupled else USUAL_ROWS) // n)
        return (most + 1) * max(1, len(self._roster))

    def _check_there(self) -> None:
        """Raises UnavailableError if nobody is there, and nobody will come."""
        absent_s = self._roster.absent_s
        if absent_s > max(_ABSENT_S, 2 * self._loading_s):
            raise UnavailableError(f"--ray: no replica has been there for {absent_s:.0f} s")
        if self._serving.all_dead():
            raise UnavailableError("--ray: all nodes of the cluster are dead")

    # --- in the loop -------------------------------------------------------------------------

    def _begin(self, search: RemoteSearch, handle: Handle) -> None:
        self._searches[search] = handle
        search.start().add_done_callback(partial(self._over, search, handle))

    def _over(self, search: RemoteSearch, handle: Handle, task: asyncio.Task[Outcome]) -> None:
        self.ledger.take_back(search.given)
        del self._searches[search]
        if task.cancelled():  # maybe before it began
            handle.settle(Cancelled())
        else:
            handle.settle(task.exception() or task.result())

    async def _look(self) -> None:
        """Who is there."""
        self._roster.update(await self._serving.pulses())

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            with suppress(Exception):  # who does not answer in time is looked for again
                await self._look()

    async def _end(self) -> None:
        for handle in self._searches.values():
            handle.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- inside ------------------------------------------------------------------------------

    def _note_teller(self) -> None:
        self._teller_is = threading.get_ident()

    def _call(self, what: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)


async def _wait(handle: Handle, ended: SimpleQueue[Handle]) -> None:
    try:
        await handle
    finally:
        ended.put(handle)
