"""The feed of the live page: an append-only list of events per search, read from any number on.

The solver's thread appends; readers in the event loop follow. Knows no HTTP (`feed_routes`).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from beamwright.errors import BeamwrightError, Cancelled
from beamwright.io import finite
from beamwright.protocols import RoundReport
from beamwright.serve.events import About, EndState, Event, PageTree, begin, decided, dotted, end
from beamwright.tree import Node

if TYPE_CHECKING:
    from beamwright.serve.job import SearchJob
    from beamwright.solver.solution import Solution

KEEP_ALIVE_S = 15.0
MOST_RUNS = 64
MOST_RUN_BYTES = 32 << 20
"""From so many bytes of events on, further steps of a run come without their text."""
MOST_BYTES = 128 << 20
"""Of all runs; those that ended first go first."""


class SearchEvents:
    """The events of one search, a line of JSON each."""

    def __init__(self, first: Event, job: SearchJob | None = None) -> None:
        assert first["event"] == "begin"
        self.begin, self.job = first, job
        self.owner = None if job is None else job.owner
        self.state, self.num_bytes, self.rounds = "waiting", 0, 0
        self._lines: list[bytes] = []
        self._wakes: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self.append(first)

    @property
    def ended(self) -> bool:
        """True if nothing will be appended any more."""
        return self.state not in ("waiting", "running")

    def append(self, event: Event) -> None:
        """From any thread; nothing follows the end."""
        # ASCII: a model's text may hold what UTF-8 cannot.
        line = json.dumps(event, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
        with self._lock:
            if self.ended:
                return
            self._lines.append(line)
            self.num_bytes += len(line)
            if event["event"] == "round":
                self.state, self.rounds = "running", event["round"]
            elif event["event"] == "end":
                self.state = event["state"]
                self.job = None  # it holds a tree, and all rounds
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Lines from number `start` on, until the end; an empty line where nothing happens."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # a loop that has been closed
                loop.call_soon_threadsafe(woken.set)

        self._wakes.add(wake)
        try:
            while True:
                woken.clear()
                with self._lock:
                    lines, ended = self._lines[start:], self.ended
                start += len(lines)
                if lines:
                    yield b"".join(lines)
                if ended:
                    return
                try:
                    await asyncio.wait_for(woken.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield b"\n"
        finally:
            self._wakes.discard(wake)

    def summary(self) -> dict[str, Any]:
        """Its line in the list of searches."""
        about = {name: self.begin[name] for name in ("id", "method", "n", "width", "started")}
        problem = self.begin["problem"]
        shown = problem if len(problem) <= 200 else problem[:199] + "\u2026"
        return {**about, "problem": shown, "state": self.state, "rounds": self.rounds}


class Feed:
    """Hears of every search (a listener of the queue) and keeps the newest.

    about: what a job is of. places: where a node's KV is; None where nobody knows. most,
    most_bytes: of the runs that are kept.
    """

    def __init__(
        self,
        about: Callable[[Any], About],
        *,
        places: Callable[[Node], str | None] | None = None,
        most: float = MOST_RUNS,
        most_bytes: float = MOST_BYTES,
    ) -> None:
        self._about, self._places = about, places
        self._most, self._most_bytes = most, most_bytes
        self._runs: dict[str, SearchEvents] = {}
        self._trees: dict[str, PageTree] = {}
        self._lock = threading.Lock()

    # --- what the queue says, from any thread -------------------------------------------------

    def begun(self, job: SearchJob) -> None:
        """A search waits, or begins; nothing, if its first round was quicker to say so."""
        with self._lock:
            if job.id in self._runs:
                return
            first = begin(job.id, self._about(job), started=time.time())
            self._trees[job.id] = PageTree(self._places)
            self._runs[job.id] = SearchEvents(first, job)
        self._forget_old()

    def round(self, job: SearchJob, report: RoundReport) -> None:
        """A round of it is decided."""
        self.begun(job)
        run, shown = self._runs[job.id], self._trees.get(job.id)
        if shown is None:
            return
        nodes = shown.changes(report.tree, texts=run.num_bytes < MOST_RUN_BYTES)
        run.append(decided(report.round, nodes, shown.num_tokens, report.elapsed_s))

    def ended(self, job: SearchJob, outcome: Solution | BaseException) -> None:
        """It has a solution, or none."""
        run, shown = self._runs.get(job.id), self._trees.pop(job.id, None)
        if run is None or shown is None:
            return
        state: EndState = "failed"
        solution = getattr(outcome, "partial", None)
        if not isinstance(outcome, BaseException):
            state, solution = "done", outcome
        elif isinstance(outcome, Cancelled):
            state = "cancelled"
        known = {} if solution is None else _ending(solution, shown)
        if state == "failed":
            # Only what was raised on purpose is fit to show.
            deliberate = isinstance(outcome, BeamwrightError)
            known["error"] = str(outcome) if deliberate else type(outcome).__name__
        run.append(end(state, **known))
        self._forget_old()

    # --- what is kept ------------------------------------------------------------------------

    def add(self, events: Sequence[Event]) -> SearchEvents:
        """A whole run, a saved one.

        Raises:
            ValueError: if it does not begin with its beginning.
        """
        if not events or events[0]["event"] != "begin":
            raise ValueError("the first event of a run is its beginning")
        run = SearchEvents(events[0])
        for event in events[1:]:
            run.append(event)
        with self._lock:
            self._runs[run.begin["id"]] = run
        self._forget_old()
        return run

    def runs(self) -> list[SearchEvents]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._runs.values()))

    def run(self, run_id: str) -> SearchEvents | None:
        """That run, if it is kept."""
        return self._runs.get(run_id)

    def _forget_old(self) -> None:
        with self._lock:
            ended = [run_id for run_id, run in self._runs.items() if run.ended]
            num_bytes = sum(run.num_bytes for run in self._runs.values())
            for run_id in ended:
                if len(self._runs) <= self._most and num_bytes <= self._most_bytes:
                    return
                if len(self._runs) > 1:
                    num_bytes -= self._runs.pop(run_id).num_bytes


def _ending(solution: Solution, shown: PageTree) -> dict[str, Any]:
    """What there is to say of a search that is over; shown: what the page knows of its tree."""
    figures: Mapping[str, Any] = solution.to_json()
    names = ("tokens", "kv", "time", "speculation", "goodput_tok_s", "rounds", "tree_hash")
    return {
        "nodes": shown.over(solution.tree),
        "answer": solution.answer,
        "chosen": dotted(solution.tree.node(solution.lineage)),
        "reason_fewer": solution.reason_fewer,
        "warnings": list(solution.warnings),
        "elapsed_s": solution.time.total_s,
        "stats": finite({name: figures[name] for name in names}),
    }
