"""FarSolver: what a server needs of a Solver, over engines that Ray Serve keeps.

A search goes to the replica with the fewest tokens to generate. Its rounds come back as what has
changed, and grow a mirror of its tree here, so whoever listens hears what one process would say.
A search whose replica dies begins again in another one: seed and problem make the tree, and rounds
that were heard before are not told twice.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from beamwright.cluster.cluster import Cluster
from beamwright.cluster.front import Front, length
from beamwright.cluster.ledger import Given, Ledger
from beamwright.cluster.mirror import Mirror
from beamwright.cluster.ray_cluster import RayCluster, last_line
from beamwright.cluster.ray_serving import RayServing
from beamwright.cluster.replica_state import ReplicaState
from beamwright.cluster.searcher import Begun, Decided, Ended, EngineFacts, News, Pulse, Taken
from beamwright.cluster.serving import Serving
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.errors import BeamwrightError, Cancelled, InputError, UnavailableError
from beamwright.plugins import load_all
from beamwright.progress import Progress
from beamwright.protocols import RoundCallback, RoundReport
from beamwright.solver.handle import Handle
from beamwright.solver.request import check_callback, check_problem, take_priority
from beamwright.solver.solution import Solution
from beamwright.tree import Problem

MOST_DEATHS = 3
"""Of a search's replica, before it fails: it is presumably the search that kills them."""

PULSE_S = 2.0
_CANCEL_S = 20.0
"""Until a cancelled search is over even if its replica says nothing of it."""

_PLACE_S = 30.0
"""Beyond its deadline, for a replica to take it: so long none has been there."""

_LEAST_S = 0.001


@dataclass(eq=False)
class _Search:
    """A search on its way, as its `Handle` sees it.

    heard: the last round that was told of. again: rounds up to this one were heard before.
    """

    given: Given
    n: int
    deadline_s: float | None
    on_round: RoundCallback | None
    begun: bool = False
    cancelled: bool = False
    replica: str | None = None
    deaths: int = 0
    heard: int = 0
    again: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    mirror: Mirror = field(default_factory=Mirror)
    task: asyncio.Task[Solution | BaseException] | None = None
    telling: Future[None] | None = None

    def left_s(self) -> float | None:
        """Of its deadline."""
        if self.deadline_s is None:
            return None
        return max(_LEAST_S, self.deadline_s - (time.monotonic() - self.asked_s))


class FarSolver:
    """Engines elsewhere as one. Use as a context: it ends what it has begun.

    Raises:
        InputError, BeamwrightError: what a Solver with these settings would, or what Ray says.
    """

    @classmethod
    def on(
        cls, cluster: Cluster, settings: Settings, *, progress: Progress | None = None
    ) -> FarSolver:
        """Over replicas of a cluster."""
        load_all(cluster.plugins)
        serving = RayServing(RayCluster(cluster, settings.model), settings)
        return cls(settings, serving, progress=progress)

    def __init__(
        self, settings: Settings, serving: Serving, *, progress: Progress | None = None
    ) -> None:
        progress = progress or Progress()
        progress.doing("reading the tokenizer")
        self._front = front = Front(settings)
        self.settings, self.codec, self.context = front.settings, front.codec, front.context
        self.ledger, self.deaths, self.restarts = Ledger(), 0, 0
        self._lock = threading.Lock()
        self._alive: dict[str, Pulse] = {}
        self._gone: Usage | None = None
        self._searches: dict[_Search, Handle] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="far", daemon=True)
        self._teller = ThreadPoolExecutor(1, "far rounds", self._note_teller)
        self._teller_is: int | None = None
        self._thread.start()
        progress.doing("starting replicas")
        self._serving = serving
        try:
            self.wanted = serving.start()
            self._facts: EngineFacts = serving.facts()
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
                self._call(self._end()).result(_CANCEL_S)
        self._serving.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._teller.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    def __enter__(self) -> FarSolver:
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
        **options: Any,
    ) -> Handle:
        """Have a problem searched by a replica; as `Solver.submit`.

        on_round is called in a thread of this solver's, with a mirror of the tree.
        """
        check_problem(problem, problem_id)
        check_callback(on_round)
        options = {name: value for name, value in options.items() if value is not None}
        take_priority(asked := dict(options))
        settings = self._front.requested(asked, self._facts).settings
        n = settings.search.n
        tokens = self.ledger.expected(length(problem), n, settings.step.max_tokens)
        given = Given(uuid.uuid4().hex, problem, problem_id, options, tokens, self.ledger)
        search = _Search(given, n, settings.stop.deadline, on_round)
        handle = Handle(problem_id, search, self)
        self._loop.call_soon_threadsafe(self._begin, search, handle)
        return handle

    def solve(self, problem: Problem, **options: Any) -> Solution:
        """Submit it, and wait."""
        return self.submit(problem, **options).result()

    def withdraw(self, search: _Search) -> None:
        """Its handle says that it is cancelled."""
        self._loop.call_soon_threadsafe(self._give_up, search)

    def check_outside(self) -> None:
        """Raises InputError in the thread that hears of rounds."""
        if threading.get_ident() == self._teller_is:
            raise InputError("a callback of a search cannot wait for one of the same FarSolver")

    # --- what there is -----------------------------------------------------------------------

    def usage(self) -> Usage:
        """Of all replicas together; counts of those that are gone included."""
        with self._lock:
            found = [pulse.usage for pulse in self._alive.values()]
            if self._gone is not None:
                found.append(self._gone)
        first, *others = found
        for each in others:
            first = first + each
        return first

    def replicas(self) -> list[ReplicaState]:
        """Those that are there, by their names."""
        loads = self.ledger.loads()
        with self._lock:
            alive = sorted(self._alive.items())
        found = []
        for name, pulse in alive:
            tokens, searches = loads.get(name, (0.0, 0))
            found.append(ReplicaState(name, pulse.process, searches, round(tokens), pulse.usage))
        return found

    # --- one search, in the loop -------------------------------------------------------------

    def _begin(self, search: _Search, handle: Handle) -> None:
        self._searches[search] = handle
        self.ledger.enter(search.given)
        search.task = self._loop.create_task(self._fly(search, handle))
        search.task.add_done_callback(partial(self._over, search, handle))

    def _over(
        self, search: _Search, handle: Handle, task: asyncio.Task[Solution | BaseException]
    ) -> None:
        self.ledger.take_back(search.given)
        del self._searches[search]
        if task.cancelled():  # maybe before it began
            handle.settle(Cancelled())
        else:
            handle.settle(task.exception() or task.result())

    async def _fly(self, search: _Search, handle: Handle) -> Solution | BaseException:
        """To its outcome, whoever dies."""
        while True:
            try:
                return await self._search(search, handle)
            except self._serving.died as error:
                outcome = self._bereaved(search, error)
                if outcome is not None:
                    return outcome

    def _bereaved(self, search: _Search, error: Exception) -> BaseException | None:
        """Its replica is gone. None: somebody else searches from the beginning."""
        self.ledger.enter(search.given)
        if search.replica is not None:
            self._forget(search.replica)
        search.replica, search.begun = None, False
        search.deaths += 1
        if search.cancelled:
            return Cancelled()
        if search.deaths >= MOST_DEATHS:
            return BeamwrightError(
                f"{search.deaths} replicas died while they had this search: {last_line(error)}"
            )
        self.restarts += 1
        search.again = search.heard
        if search.deadline_s is not None:
            options = {**search.given.options, "deadline": search.left_s()}
            search.given = replace(search.given, options=options)
        return None

    async def _search(self, search: _Search, handle: Handle) -> Solution | BaseException:
        stream = self._serving.search(search.given)
        try:
            try:
                left_s = search.left_s()
                async with asyncio.timeout(None if left_s is None else left_s + _PLACE_S):
                    news: News = await anext(stream)
            except TimeoutError:
                stream.cancel()
                return UnavailableError("no replica could take the search in its time")
            ended = None
            while ended is None:
                ended = await self._hear(search, handle, news)
                if ended is None:
                    news = await anext(stream)
            async for _ in stream:
                pass
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return self._outcome(search, ended)

    async def _hear(self, search: _Search, handle: Handle, news: News) -> Ended | None:
        match news:
            case Taken():
                search.replica = news.replica
                self.ledger.give(search.given, news.replica)
                if search.cancelled:
                    self._give_up(search)
            case Begun():
                search.begun = True
            case Decided():
                search.begun = True
                self._note(search, news.usage)
                self.ledger.note(search.given, news.generated)
                search.mirror.hear(news.round.tree)
                if news.round.round > search.again:
                    search.again, search.heard = 0, news.round.round
                    if search.on_round is not None and not handle.done():
                        await self._tell(search, search.mirror.report(news.round))
                    if search.cancelled:
                        self._give_up(search)
            case Ended():
                self._note(search, news.usage)
                return news
        return None

    async def _tell(self, search: _Search, report: RoundReport) -> None:
        """Its mirror stays as it is until whoever listens has looked."""
        assert search.on_round is not None
        search.telling = self._teller.submit(search.on_round, report)
        try:
            await asyncio.wrap_future(search.telling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # else `_give_up` did not want it told any more

    def _outcome(self, search: _Search, ended: Ended) -> Solution | BaseException:
        if ended.bug is not None:
            return RuntimeError(f"in a replica: {ended.bug}")
        solution = ended.solution
        if solution is not None and ended.tree is not None:
            search.mirror.hear(ended.tree)
            solution = replace(solution, tree=search.mirror.tree)
            self.ledger.learn(solution.tokens.generated, search.n)
        error = None if ended.error is None else ended.error.error()
        if error is None and search.cancelled:  # it ended before its replica heard of it
            error = Cancelled()
        if error is not None:
            error.partial = solution
            return error
        assert solution is not None
        return solution

    def _give_up(self, search: _Search) -> None:
        """Its replica ends it, and says what there was; where none has it, it is over."""
        if search not in self._searches or search.task is None:
            return
        if search.replica is None:
            search.task.cancel()
            return
        if search.telling is not None:
            search.telling.cancel()  # nothing, once it is being told
        self._loop.create_task(self._serving.cancel(search.given.id))
        self._loop.call_later(_CANCEL_S, search.task.cancel)

    # --- replicas, in the loop ---------------------------------------------------------------

    def _note(self, search: _Search, usage: Usage) -> None:
        with self._lock:
            pulse = self._alive.get(search.replica or "")
            if pulse is not None:
                self._alive[pulse.replica] = replace(pulse, usage=usage)

    def _forget(self, replica: str) -> None:
        with self._lock:
            pulse = self._alive.pop(replica, None)
            if pulse is None:
                return
            self.deaths += 1
            counts = pulse.usage.over()
            self._gone = counts if self._gone is None else self._gone + counts

    async def _look(self) -> None:
        """Who is there."""
        found = await self._serving.pulses()
        for name in set(self._alive) - {pulse.replica for pulse in found}:
            self._forget(name)
        with self._lock:
            self._alive.update({pulse.replica: pulse for pulse in found})

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
