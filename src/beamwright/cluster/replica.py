"""Replica: one engine in a separate process, which runs searches and streams their rounds.

This module does not use Ray; `serving` deploys the class with Ray Serve.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from beamwright import errors
from beamwright.cluster.mirror import TreeChangeCollector, TreeUpdate
from beamwright.cluster.roster import Heartbeat, SearchRequest
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.declare import load_plugins
from beamwright.errors import BeamwrightError, Cancelled, InputError, NotFiniteError
from beamwright.protocols import RoundReport
from beamwright.solver.handle import Handle
from beamwright.solver.solution import Solution
from beamwright.solver.solver import Solver
from beamwright.tree import SearchTree

# Number of consecutive searches with a bug after which the replica counts as broken.
MOST_BUGS = 3

# Seconds without a call of `heartbeat` after which a replica ends the Ray Serve application, since
# a server that was killed cannot end its replicas.
ABANDONED_S = 120.0


@dataclass(frozen=True)
class SearchMessage:
    """A message of a replica about a search: a round is over, or the search has ended."""

    usage: Usage  # memory and counts of the replica
    tree: TreeUpdate | None = None  # changes of the tree since the last message, if requested
    ended: bool = False
    # The solution without its tree. If `error` is set, too: the best solution before the error.
    solution: Solution | None = None
    error: BeamwrightError | None = None  # the error that ended the search (`picklable_error`)
    bug: str | None = None  # class and message of an error that is not a `BeamwrightError`


class Replica:
    """One engine of a cluster, in a process of its own. The constructor loads the models.

    plugins: files with declarations that the settings may name.
    name: returns the name of this replica in Ray.
    abandoned: called if `ABANDONED_S` seconds pass after a call of `heartbeat` without another.
    in_flight: maximum number of problems in flight; None: as many as keep the engine busy.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        plugins: Sequence[str] = (),
        name: Callable[[], str] = lambda: "alone",
        abandoned: Callable[[], None] = lambda: None,
        in_flight: int | None = None,
    ) -> None:
        load_plugins(plugins)
        self._solver = Solver(Settings.model_validate(settings))
        self._solver.most_submitted = in_flight
        self._name, self._abandoned = name, abandoned
        self._watch: asyncio.TimerHandle | None = None
        self._handles: dict[str, Handle] = {}
        self._bugs = 0

    async def heartbeat(self) -> Heartbeat:
        """Report that this replica is alive, and restart the timeout `ABANDONED_S`."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_later(ABANDONED_S, self._abandoned)
        return Heartbeat(self._name(), os.getpid(), self._solver.exact, self._solver.usage())

    async def check_health(self) -> None:
        """Raise if all recent searches had bugs, as they have after a fault of the device.

        Ray calls this method, and replaces the replica if the call raises.

        Raises:
            RuntimeError: after `MOST_BUGS` consecutive searches with a bug.
        """
        if self._bugs >= MOST_BUGS:
            raise RuntimeError(f"{self._bugs} searches in a row have failed")

    async def search(self, given: SearchRequest) -> AsyncIterator[str | SearchMessage]:
        """Run a search concurrently with others, and stream messages about it.

        The stream begins with the name of this replica. The last message has the outcome. Closing
        the stream cancels the search.
        """
        yield self._name()
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[SearchMessage]()
        changes = TreeChangeCollector()

        def on_round(report: RoundReport) -> None:
            news = SearchMessage(self._solver.usage(), changes.collect(report.tree, report))
            loop.call_soon_threadsafe(heard.put_nowait, news)

        def over(ended: asyncio.Task[Solution]) -> None:
            if not ended.cancelled():
                outcome = ended.exception() or ended.result()
                heard.put_nowait(self._last_news(outcome, given, changes))

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
            yield self._last_news(error, given, changes)
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
        """Cancel the search with the id `search`, which ends with its best solution so far."""
        handle = self._handles.get(search)
        if handle is not None:
            handle.cancel()

    def _last_news(
        self, outcome: Solution | BaseException, given: SearchRequest, changes: TreeChangeCollector
    ) -> SearchMessage:
        """Return the last message of a search, and count consecutive bugs for `check_health`."""
        best = outcome if isinstance(outcome, Solution) else getattr(outcome, "partial", None)
        tree = error = bug = None
        if isinstance(best, Solution):
            tree = None if given.tells == "nothing" else changes.collect(best.tree)
            root = best.tree.root
            bare = SearchTree(root.problem_id, root.token_ids, root.problem_text)
            best = replace(best, tree=bare)
        if isinstance(outcome, BeamwrightError):
            error = picklable_error(outcome)
        elif isinstance(outcome, BaseException):
            bug = f"{type(outcome).__name__}: {outcome}"
        if not isinstance(outcome, Cancelled):
            self._bugs = 0 if bug is None else self._bugs + 1
        return SearchMessage(self._solver.usage(), tree, True, best, error, bug)


def picklable_error(error: BeamwrightError) -> BeamwrightError:
    """Return `error` in a form that every process can unpickle.

    An error class that a user defined is replaced by its base class among `InputError`,
    `NotFiniteError` and `BeamwrightError`.
    """
    if type(error).__module__ == errors.__name__:
        return error
    kinds = (kind for kind in (InputError, NotFiniteError) if isinstance(error, kind))
    return next(kinds, BeamwrightError)(str(error))
