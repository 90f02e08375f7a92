"""Replica: one engine in a process of its own, which streams rounds and outcomes.

Knows nothing of Ray: a deployment is made of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from beamwright import errors
from beamwright.cluster.mirror import Changes, TreeNews
from beamwright.cluster.roster import Given, Pulse
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.declare import load_all
from beamwright.errors import BeamwrightError, Cancelled, InputError, NotFiniteError
from beamwright.protocols import RoundReport
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver
from beamwright.tree import SearchTree

MOST_BUGS = 3
"""Searches in a row that may end by a bug before the engine counts as broken."""

ABANDONED_S = 120.0
"""Timeout without a question for its pulse: a server that was killed cannot end its replicas."""


@dataclass(frozen=True)
class News:
    """A round is decided, or the search has ended.

    tree: what of it was not told; None where it is not to be told. solution: without its tree;
    beside an error, the best so far. error: see `sent`. bug: an error that nobody raised on
    purpose; its class and words.
    """

    usage: Usage
    tree: TreeNews | None = None
    ended: bool = False
    solution: Solution | None = None
    error: BeamwrightError | None = None
    bug: str | None = None


class Replica:
    """Loads its models at once. plugins: files whose declarations the settings may name.

    name: of this replica, by whoever placed it. abandoned: called once nobody has asked for its
    pulse for two minutes, after the first time. in_flight: problems at a time, None for as many as
    keep it busy.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        plugins: Sequence[str] = (),
        name: Callable[[], str] = lambda: "alone",
        abandoned: Callable[[], None] = lambda: None,
        in_flight: int | None = None,
    ) -> None:
        load_all(plugins)
        self._solver = Solver(Settings.model_validate(settings))
        self._solver.most_submitted = in_flight
        self._name, self._abandoned = name, abandoned
        self._watch: asyncio.TimerHandle | None = None
        self._handles: dict[str, Handle] = {}
        self._bugs = 0

    async def pulse(self) -> Pulse:
        """Say that it is alive, and what it uses."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_later(ABANDONED_S, self._abandoned)
        return Pulse(self._name(), os.getpid(), self._solver.exact, self._solver.usage())

    async def check_health(self) -> None:
        """Raises RuntimeError after several bugs in a row: the device may be lost."""
        if self._bugs >= MOST_BUGS:
            raise RuntimeError(f"{self._bugs} searches in a row have failed")

    async def search(self, given: Given) -> AsyncIterator[str | News]:
        """Search beside the others. Stream the name of this replica, which has taken it, and then
        the news; closing the stream cancels the search."""
        yield self._name()
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[News]()
        changes = Changes()

        def on_round(report: RoundReport) -> None:
            news = News(self._solver.usage(), changes.of(report.tree, report))
            loop.call_soon_threadsafe(heard.put_nowait, news)

        def over(ended: asyncio.Task[Solution]) -> None:
            if not ended.cancelled():
                outcome = ended.exception() or ended.result()
                heard.put_nowait(self._ended(outcome, given, changes))

        submit = self._solver.submit
        if given.paths is not None:
            submit = partial(self._solver.submit_score, paths=given.paths)
        try:
            handle = submit(
                given.problem,
                problem_id=given.problem_id,
                on_round=on_round if given.tells == "rounds" else None,
                **given.options,
            )
        except BeamwrightError as error:
            yield self._ended(error, given, changes)
            return
        self._handles[given.id] = handle
        ending = asyncio.ensure_future(handle)
        ending.add_done_callback(over)
        try:
            while not (news := await heard.get()).ended:
                yield news
            yield news
        finally:
            del self._handles[given.id]
            ending.cancel()
            handle.cancel()

    async def cancel(self, search: str) -> None:
        """Cancel a search of this replica, which then ends with the best so far."""
        handle = self._handles.get(search)
        if handle is not None:
            handle.cancel()

    def _ended(self, outcome: Solution | BaseException, given: Given, changes: Changes) -> News:
        best = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        tree = error = bug = None
        if isinstance(best, Solution):
            tree = None if given.tells == "nothing" else changes.of(best.tree)
            root = best.tree.root
            bare = SearchTree(root.problem_id, root.token_ids, root.problem_text)
            best = replace(best, tree=bare)
        if isinstance(outcome, BeamwrightError):
            error = sent(outcome)
        elif isinstance(outcome, BaseException):
            bug = f"{type(outcome).__name__}: {outcome}"
        if not isinstance(outcome, Cancelled):
            self._bugs = 0 if bug is None else self._bugs + 1
        return News(self._solver.usage(), tree, True, best, error, bug)


def sent(error: BeamwrightError) -> BeamwrightError:
    """Make an error fit to cross processes: a user's own class becomes the nearest of ours, which
    every process has."""
    if type(error).__module__ == errors.__name__:
        return error
    kinds = (kind for kind in (InputError, NotFiniteError) if isinstance(error, kind))
    return next(kinds, BeamwrightError)(str(error))
