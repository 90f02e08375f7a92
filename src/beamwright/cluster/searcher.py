"""Searcher: one engine of a server, in a process of its own; what it finds goes out as it comes.

Knows nothing of Ray: a deployment is made of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamwright.cluster.ledger import Given
from beamwright.cluster.mirror import Changes, RoundNews, TreeNews
from beamwright.cluster.replica import FarError
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.engine.limits import num_generated
from beamwright.errors import BeamwrightError, Cancelled
from beamwright.plugins import load_all
from beamwright.protocols import RoundReport
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver

MOST_BUGS = 3
"""Searches in a row that end with no error of ours, before the engine counts as broken."""

_LOOK_S = 0.02
_ABANDONED_S = 120.0
_WATCH_S = 5.0


@dataclass(frozen=True)
class Taken:
    """The search is in this replica's hands."""

    replica: str


@dataclass(frozen=True)
class Begun:
    """It is in flight."""


@dataclass(frozen=True)
class Decided:
    """A round. generated: tokens so far."""

    round: RoundNews
    generated: int
    usage: Usage


@dataclass(frozen=True)
class Ended:
    """Its outcome. solution: without its tree; the best until then where there is an error, too.

    bug: an error that nobody raised on purpose; its class and words.
    """

    solution: Solution | None
    tree: TreeNews | None
    error: FarError | None
    bug: str | None
    usage: Usage


News = Taken | Begun | Decided | Ended


@dataclass(frozen=True)
class EngineFacts:
    """Of an engine, what whoever asks it has to know beforehand.

    probabilities: every score of its verifier is one. token_stats: that it keeps of every token.
    """

    exact: bool
    probabilities: bool
    token_stats: frozenset[str]


@dataclass(frozen=True)
class Pulse:
    """That a replica is there, and what it uses. process: its id, where it runs."""

    replica: str
    process: int
    usage: Usage


class Searcher:
    """Loads its models at once. plugins: files whose declarations the settings may name.

    name: of this replica, by whoever placed it. abandoned: called once nobody has asked for its
    pulse for two minutes.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        plugins: Sequence[str] = (),
        name: Callable[[], str] = lambda: "alone",
        abandoned: Callable[[], None] | None = None,
    ) -> None:
        load_all(plugins)
        self._solver = Solver(Settings.model_validate(settings))
        self._name, self._abandoned = name, abandoned
        self._handles: dict[str, Handle] = {}
        self._bugs = 0
        self._watch: asyncio.Task[None] | None = None
        self._asked_s = 0.0

    def facts(self) -> EngineFacts:
        """What is the same for all searches."""
        solver = self._solver
        return EngineFacts(solver.exact, solver.verifier.probabilities, solver.token_stats)

    async def pulse(self) -> Pulse:
        """That it is there."""
        loop = asyncio.get_running_loop()
        self._asked_s = loop.time()
        if self._watch is None and self._abandoned is not None:
            self._watch = loop.create_task(self._look_after())
        return Pulse(self._name(), os.getpid(), self._solver.usage())

    async def check_health(self) -> None:
        """Raises RuntimeError once it fails at everything: its device may be lost."""
        if self._bugs >= MOST_BUGS:
            raise RuntimeError(f"{self._bugs} searches in a row have failed")

    async def search(self, given: Given) -> AsyncIterator[News]:
        """Search beside the others. Whoever stops listening has it cancelled."""
        yield Taken(self._name())
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[News]()
        changes = Changes()

        def say(news: News) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, news)

        def on_round(report: RoundReport) -> None:
            news = changes.of_round(report)
            say(Decided(news, num_generated(report.tree), self._solver.usage()))

        try:
            handle = self._solver.submit(
                given.problem, problem_id=given.problem_id, on_round=on_round, **given.options
            )
        except BeamwrightError as error:
            yield self._ended(error, changes)
            return
        self._handles[given.id] = handle
        ending = loop.create_task(self._end(handle, changes, heard))
        try:
            while True:
                news = await heard.get()
                yield news
                if isinstance(news, Ended):
                    return
        finally:
            del self._handles[given.id]
            ending.cancel()
            handle.cancel()

    async def cancel(self, search: str) -> None:
        """Give it up; what there is of it comes as its end. Nothing, if it is somebody else's."""
        handle = self._handles.get(search)
        if handle is not None:
            handle.cancel()

    # --- inside ------------------------------------------------------------------------------

    async def _end(self, handle: Handle, changes: Changes, heard: asyncio.Queue[News]) -> None:
        while not handle.begun and not handle.done():
            await asyncio.sleep(_LOOK_S)
        heard.put_nowait(Begun())
        outcome: Solution | BaseException
        try:
            outcome = await handle
        except asyncio.CancelledError:  # of this task
            raise
        except BaseException as error:
            outcome = error
        heard.put_nowait(self._ended(outcome, changes))

    def _ended(self, outcome: Solution | BaseException, changes: Changes) -> Ended:
        found = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        tree, error, bug = None, None, None
        if isinstance(found, Solution):
            tree = changes.of_end(found.tree)
            found = replace(found, tree=found.tree.bare())
        if isinstance(outcome, BeamwrightError):
            error = FarError.of(outcome)
        elif isinstance(outcome, BaseException):
            bug = f"{type(outcome).__name__}: {outcome}"
        if not isinstance(outcome, Cancelled):
            self._bugs = 0 if bug is None else self._bugs + 1
        return Ended(found, tree, error, bug, self._solver.usage())

    async def _look_after(self) -> None:
        """A server that was killed cannot take its replicas with it."""
        assert self._abandoned is not None
        loop = asyncio.get_running_loop()
        while loop.time() - self._asked_s < _ABANDONED_S:
            await asyncio.sleep(_WATCH_S)
        self._abandoned()
