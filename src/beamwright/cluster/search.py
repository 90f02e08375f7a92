"""RemoteSearch: one search on its way at a replica, until its outcome, whoever dies.

Its rounds come back as what has changed, and grow a mirror of its tree. One whose replica dies
begins again in another one: seed and problem make the tree, and rounds that were heard before are
not told twice. All of it happens in one event loop, but for what listens to rounds.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from beamwright.cluster.ledger import Given, Ledger
from beamwright.cluster.mirror import Mirror
from beamwright.cluster.replica import Begun, Decided, Ended, News, Taken
from beamwright.cluster.roster import Roster
from beamwright.cluster.serving import RayServing, last_line
from beamwright.errors import BeamwrightError, Cancelled, UnavailableError
from beamwright.protocols import RoundCallback, RoundReport
from beamwright.solver.solution import Solution

MOST_DEATHS = 3
"""Of a search's replica, before it fails: it is presumably the search that kills them."""

CANCEL_S = 20.0
"""Until a cancelled search is over even if its replica says nothing of it."""

_PLACE_S = 30.0
"""Beyond its deadline, for a replica to take it: so long none has been there."""

_LEAST_S = 0.001

Outcome = Solution | BaseException


@dataclass(frozen=True)
class Surroundings:
    """What all searches share. teller: a thread in which whoever listens hears of rounds."""

    serving: RayServing
    ledger: Ledger
    roster: Roster
    teller: Executor


class RemoteSearch:
    """A search as its `Handle` sees it. n: its candidates."""

    def __init__(
        self,
        given: Given,
        n: int,
        deadline_s: float | None,
        on_round: RoundCallback | None,
        around: Surroundings,
    ) -> None:
        self.given, self.on_round = given, on_round
        self.begun = self.cancelled = False
        self.mirror = Mirror()
        self._n, self._deadline_s, self._around = n, deadline_s, around
        self._asked_s = time.monotonic()
        self._replica: str | None = None
        self._deaths = 0
        self._told = 0  # the last round
        self._again = 0  # rounds up to this one were told before its replica died
        self._task: asyncio.Task[Outcome] | None = None
        self._telling: Future[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[Outcome]:
        """Have it searched; in the loop."""
        self._around.ledger.enter(self.given)
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def give_up(self) -> None:
        """Its replica ends it, and says what there was; where none has it, it is over."""
        if self._task is None or self._task.done():
            return
        if self._replica is None:
            self._task.cancel()
            return
        if self._telling is not None:
            self._telling.cancel()  # nothing, once it is being told
        loop = asyncio.get_running_loop()
        self._cancelling = loop.create_task(self._around.serving.cancel(self.given.id))
        loop.call_later(CANCEL_S, self._task.cancel)

    async def _run(self) -> Outcome:
        while True:
            try:
                return await self._search()
            except self._around.serving.died as error:
                outcome = self._bereaved(error)
                if outcome is not None:
                    return outcome

    def _bereaved(self, error: Exception) -> BaseException | None:
        """Its replica is gone. None: somebody else searches from the beginning."""
        around = self._around
        around.ledger.enter(self.given)
        if self._replica is not None:
            around.roster.forget(self._replica)
        self._replica, self.begun = None, False
        self._deaths += 1
        if self.cancelled:
            return Cancelled()
        if self._deaths >= MOST_DEATHS:
            return BeamwrightError(
                f"problem {self.given.problem_id}: {self._deaths} replicas died while they had "
                f"this search: {last_line(error)}"
            )
        around.roster.restarts += 1
        self._again = self._told
        if self._deadline_s is not None:
            options = {**self.given.options, "deadline": self._left_s()}
            self.given = replace(self.given, options=options)
        return None

    def _left_s(self) -> float | None:
        """Of its deadline."""
        if self._deadline_s is None:
            return None
        return max(_LEAST_S, self._deadline_s - (time.monotonic() - self._asked_s))

    async def _search(self) -> Outcome:
        stream, left_s = self._around.serving.search(self.given), self._left_s()
        try:
            async with asyncio.timeout(None if left_s is None else left_s + _PLACE_S):
                news: News = await anext(stream)
            while not isinstance(news, Ended):
                await self._hear(news)
                news = await anext(stream)
            async for _ in stream:
                pass
        except TimeoutError:
            stream.cancel()
            return UnavailableError("no replica could take the search in its time")
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return self._outcome(news)

    async def _hear(self, news: Taken | Begun | Decided) -> None:
        around = self._around
        match news:
            case Taken():
                self._replica = news.replica
                around.ledger.give(self.given, news.replica)
                around.roster.note(news.replica)
            case Begun():
                self.begun = True
            case Decided():
                self.begun = True
                around.roster.note(self._replica, news.usage)
                around.ledger.note(self.given, news.generated)
                self.mirror.hear(news.round.tree)
                if news.round.round > self._again:
                    self._again, self._told = 0, news.round.round
                    await self._tell(self.mirror.report(news.round))
        if self.cancelled:
            self.give_up()

    async def _tell(self, report: RoundReport) -> None:
        """Its mirror stays as it is until whoever listens has looked."""
        if self.on_round is None or self.cancelled:
            return
        self._telling = self._around.teller.submit(self.on_round, report)
        try:
            await asyncio.wrap_future(self._telling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # else `give_up` did not want it told any more

    def _outcome(self, ended: Ended) -> Outcome:
        self._around.roster.note(self._replica, ended.usage)
        if ended.bug is not None:
            return RuntimeError(f"in a replica: {ended.bug}")
        solution = ended.solution
        if solution is not None:
            self._around.ledger.learn(solution.tokens.generated, self._n)
            if ended.tree is not None:
                self.mirror.hear(ended.tree)
                solution = replace(solution, tree=self.mirror.tree)
        error = None if ended.error is None else ended.error.error()
        if error is None and self.cancelled:  # it ended before its replica heard of it
            error = Cancelled()
        if error is not None:
            error.partial = solution
            return error
        assert solution is not None
        return solution
