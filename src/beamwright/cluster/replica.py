"""Replica: one engine in a process of its own; what it finds goes out as it comes.

Knows nothing of Ray: a deployment is made of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamwright import errors
from beamwright.cluster.ledger import Given
from beamwright.cluster.mirror import Changes, RoundNews, TreeNews
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.declare import load_all
from beamwright.engine.decisions import num_generated
from beamwright.errors import BeamwrightError, Cancelled, InputError, NotFiniteError
from beamwright.protocols import RoundReport
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver
from beamwright.tree import SearchTree

MOST_BUGS = 3
"""Searches in a row that end with no error of ours, before the engine counts as broken."""

_LOOK_S = 0.02
_ABANDONED_S = 120.0
_WATCH_S = 5.0


_SIMPLE = (InputError, NotFiniteError)  # told by their line alone


@dataclass(frozen=True)
class SentError:
    """An error as it crosses processes. kind: its class in `beamwright.errors`.

    attributes: with its `args`, all that it says.
    """

    kind: str
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BeamwrightError) -> SentError:
        """What there was of a solution stays where it is; a user's own class is the nearest of
        ours: another process may not have it."""
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        if kind is not type(error):
            nearest = (simple for simple in _SIMPLE if isinstance(error, simple))
            kind = next(nearest, BeamwrightError)
            return cls(kind.__name__, (str(error),), {})
        attributes = {name: value for name, value in vars(error).items() if name != "partial"}
        return cls(kind.__name__, error.args, attributes)

    def error(self) -> BeamwrightError:
        """The same kind of error again."""
        kind: type[BeamwrightError] = getattr(errors, self.kind)
        error = kind.__new__(kind)
        error.args = self.args
        vars(error).update(self.attributes)
        return error


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

    tree: what of it was not told; None where it is not to be told. bug: an error that nobody
    raised on purpose; its class and words.
    """

    solution: Solution | None
    tree: TreeNews | None
    error: SentError | None
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


class Replica:
    """Loads its models at once. plugins: files whose declarations the settings may name.

    name: of this replica, by whoever placed it. abandoned: called once nobody has asked for its
    pulse for two minutes. in_flight: problems at a time, None for as many as keep it busy.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        plugins: Sequence[str] = (),
        name: Callable[[], str] = lambda: "alone",
        abandoned: Callable[[], None] | None = None,
        in_flight: int | None = None,
    ) -> None:
        load_all(plugins)
        self._solver = Solver(Settings.model_validate(settings))
        self._solver.most_submitted = in_flight
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

        def on_round(report: RoundReport) -> None:
            generated, usage = num_generated(report.tree), self._solver.usage()
            news = Decided(changes.of_round(report), generated, usage)
            loop.call_soon_threadsafe(heard.put_nowait, news)

        try:
            handle = self._solver.submit(
                given.problem,
                problem_id=given.problem_id,
                on_round=on_round if given.tells == "rounds" else None,
                **given.options,
            )
        except BeamwrightError as error:
            yield self._ended(error, given, changes)
            return
        self._handles[given.id] = handle
        ending = loop.create_task(self._end(handle, given, changes, heard))
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

    async def _end(
        self, handle: Handle, given: Given, changes: Changes, heard: asyncio.Queue[News]
    ) -> None:
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
        heard.put_nowait(self._ended(outcome, given, changes))

    def _ended(self, outcome: Solution | BaseException, given: Given, changes: Changes) -> Ended:
        best = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        tree, error, bug = None, None, None
        if isinstance(best, Solution):
            tree = None if given.tells == "nothing" else changes.of_end(best.tree)
            root = best.tree.root
            bare = SearchTree(root.problem_id, root.token_ids, root.problem_text)
            best = replace(best, tree=bare)
        if isinstance(outcome, BeamwrightError):
            error = SentError.of(outcome)
        elif isinstance(outcome, BaseException):
            bug = f"{type(outcome).__name__}: {outcome}"
        if not isinstance(outcome, Cancelled):
            self._bugs = 0 if bug is None else self._bugs + 1
        return Ended(best, tree, error, bug, self._solver.usage())

    async def _look_after(self) -> None:
        """A server that was killed cannot take its replicas with it."""
        assert self._abandoned is not None
        loop = asyncio.get_running_loop()
        while loop.time() - self._asked_s < _ABANDONED_S:
            await asyncio.sleep(_WATCH_S)
        self._abandoned()
