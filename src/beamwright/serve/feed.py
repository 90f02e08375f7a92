"""The feed of the live page: an append-only list of events per search, and its HTTP routes.

The solver's thread appends events, and readers in the event loop follow them from any position on.
The page reads the lines of JSON with `fetch` instead of EventSource, because only `fetch` can send
an API key in the Authorization header. `server.Guard` checks keys, hosts and origins before a
request reaches these routes. The page's files are served with a strict content security policy.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from beamwright.errors import BeamwrightError, Cancelled
from beamwright.io import nonfinite_as_null
from beamwright.page.runs import (
    EndState,
    Event,
    PageChanges,
    begin_event,
    dotted_lineage,
    end_event,
    fill_page,
)
from beamwright.protocols import RoundReport
from beamwright.search import STRATEGIES
from beamwright.serve.body import AsciiJSON, parse_fields, read_body
from beamwright.serve.server import owner_of
from beamwright.tree import Node

if TYPE_CHECKING:
    from beamwright.serve.job import SearchJob
    from beamwright.serve.queue import RequestQueue
    from beamwright.solver.solution import Solution

KEEP_ALIVE_S = 15.0
MOST_RUNS = 64
# Maximum bytes of all runs together, above which the oldest ended runs are dropped.
MOST_BYTES = 128 << 20


class SearchEvents:
    """The events of one search, each as a line of JSON, which any number of readers follow.

    places: returns where the KV of a node is; None if this is unknown.
    """

    def __init__(
        self,
        first: Event,
        job: SearchJob | None = None,
        places: Callable[[Node], str | None] | None = None,
    ) -> None:
        assert first["event"] == "begin"
        self.begin, self.job, self.tree = first, job, PageChanges(places)
        self.owner = None if job is None else job.owner
        self.state, self.num_bytes, self.rounds = "waiting", 0, 0
        self._lines: list[bytes] = []
        self._wakes: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self.append(first)

    @property
    def ended(self) -> bool:
        """True if the search has ended, so that no more events follow."""
        return self.state not in ("waiting", "running")

    def append(self, event: Event) -> None:
        """Append an event and wake the readers; any thread may call this.

        An event after the end event is ignored.
        """
        # ASCII: a model's text may hold lone surrogates, which UTF-8 cannot encode.
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
                self.job, self.tree = None, PageChanges()  # free the search tree; both refer to it
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Yield the lines from number `start` on until the search ends.

        After `KEEP_ALIVE_S` seconds without an event, an empty line keeps the connection alive.
        """
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's event loop may be closed already
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
        """Return the entry of this search in the list of searches."""
        about = {name: self.begin[name] for name in ("id", "method", "n", "width", "started")}
        problem = self.begin["problem"]
        shown = problem if len(problem) <= 200 else problem[:199] + "\u2026"
        return {**about, "problem": shown, "state": self.state, "rounds": self.rounds}


class Feed:
    """Listener of the request queue that records the events of the newest searches.

    places: returns where the KV of a node is; None if this is unknown.
    most, most_bytes: maximum number of runs to keep, and of their bytes together.
    """

    def __init__(
        self,
        *,
        places: Callable[[Node], str | None] | None = None,
        most: float = MOST_RUNS,
        most_bytes: float = MOST_BYTES,
    ) -> None:
        self._places, self._most, self._most_bytes = places, most, most_bytes
        self._runs: dict[str, SearchEvents] = {}
        self._lock = threading.Lock()

    # --- listener methods: the queue calls them from any thread -------------------------------

    def on_begun(self, job: SearchJob) -> None:
        """Begin a run for a job that was submitted."""
        first = begin_event(job.id, job.about, time.time())
        self._keep(SearchEvents(first, job, self._places))

    def on_round(self, job: SearchJob, report: RoundReport) -> None:
        """Append the event of a decided round."""
        run = self._runs[job.id]
        nodes = run.tree.changes(report.tree)
        run.append({
            "event": "round", "round": report.round, "nodes": nodes,
            "tokens": run.tree.num_tokens, "elapsed_s": report.elapsed_s,
        })  # fmt: skip

    def on_ended(self, job: SearchJob, outcome: Solution | BaseException) -> None:
        """Append the end event of a job, with its solution or its error."""
        run = self._runs[job.id]
        state: EndState = "failed"
        solution = getattr(outcome, "partial", None)
        if not isinstance(outcome, BaseException):
            state, solution = "done", outcome
        elif isinstance(outcome, Cancelled):
            state = "cancelled"
        known = {} if solution is None else _ending(solution, run.tree)
        if state == "failed":
            # An unexpected exception's message is not for users, so show only its type.
            deliberate = isinstance(outcome, BeamwrightError)
            known["error"] = str(outcome) if deliberate else type(outcome).__name__
        run.append(end_event(state, **known))
        self._keep(run)

    # --- runs ---------------------------------------------------------------------------------

    def add(self, events: Sequence[Event]) -> SearchEvents:
        """Add a saved run by its list of events, and return it."""
        run = SearchEvents(events[0])
        for event in events[1:]:
            run.append(event)
        self._keep(run)
        return run

    def runs(self) -> list[SearchEvents]:
        """Return the kept runs, newest first."""
        with self._lock:
            return list(reversed(self._runs.values()))

    def run(self, run_id: str) -> SearchEvents | None:
        """Return the run with this id; None if it is unknown or was dropped."""
        return self._runs.get(run_id)

    def _keep(self, run: SearchEvents) -> None:
        """Keep a run, and drop the oldest ended runs until the limits hold.

        Runs of searches that have not ended are never dropped, nor is the newest run.
        """
        with self._lock:
            self._runs.setdefault(run.begin["id"], run)
            num_bytes = sum(run.num_bytes for run in self._runs.values())
            for run_id in [run_id for run_id, run in self._runs.items() if run.ended]:
                if len(self._runs) <= self._most and num_bytes <= self._most_bytes:
                    return
                if len(self._runs) > 1:
                    num_bytes -= self._runs.pop(run_id).num_bytes


def _ending(solution: Solution, shown: PageChanges) -> dict[str, Any]:
    """Return the fields of an end event for a solution.

    shown: the tree with the values that earlier events have sent.
    """
    figures: Mapping[str, Any] = solution.to_json()
    names = ("tokens", "kv", "time", "speculation", "goodput_tok_s", "rounds", "tree_hash")
    return {
        "nodes": shown.last_changes(solution.tree),
        "answer": solution.answer,
        "chosen": dotted_lineage(solution.tree.node(solution.lineage)),
        "reason_fewer": solution.reason_fewer,
        "warnings": list(solution.warnings),
        "elapsed_s": solution.time.total_s,
        "stats": nonfinite_as_null({name: figures[name] for name in names}),
    }


# --- HTTP ------------------------------------------------------------------------------------

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_HEAD = (
    '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="/page/page.css">\n'
    '<script type="module" src="/page/main.js"></script>'
)

# A function that returns current figures in the order in which the page shows them.
#
# A gauge is {name, value, unit?, of?}. A counter, whose increase per second the page shows, is
# {name, total, unit?}. unit: "bytes" or a word. of: the maximum of the value.
Gauges = Callable[[], Sequence[Mapping[str, Any]]]


class FeedProblem(BaseModel):
    """A problem to solve. options: options as in the `search` object of a chat completion."""

    model_config = ConfigDict(extra="forbid")

    problem: str = Field(strict=True, min_length=1)
    options: dict[str, Any] = {}


def feed_routes(feed: Feed, queue: RequestQueue | None, gauges: Gauges = tuple) -> APIRouter:
    """Return the routes below `/feed`. queue: None to show saved runs and accept no searches."""
    routes = APIRouter(prefix="/feed")

    def kept(run_id: str, request: Request) -> SearchEvents:
        run = feed.run(run_id)
        if run is None or run.owner != owner_of(request):
            raise HTTPException(404, "no such search; the server keeps only recent ones")
        return run

    @routes.get("/searches")
    async def searches(request: Request) -> Response:
        """List the searches of this API key, newest first: waiting, running and ended ones."""
        mine = [run.summary() for run in feed.runs() if run.owner == owner_of(request)]
        asks, methods = queue is not None, list(STRATEGIES)
        return AsciiJSON({"asks": asks, "methods": methods, "searches": mine})

    @routes.post("/searches")
    async def ask(request: Request) -> dict[str, Any]:
        """Begin a search, and return its id."""
        if queue is None:
            raise HTTPException(405, "saved runs are read-only")
        given = await read_body(request, queue.limits, partial(parse_fields, FeedProblem))
        job = await queue.begin_search(given.problem, given.options, owner_of(request))
        return {"id": job.id}

    @routes.get("/searches/{run_id}")
    async def follow(
        request: Request, run_id: str, start: Annotated[int, Query(alias="from", ge=0)] = 0
    ) -> StreamingResponse:
        """Stream the events of a search from number `from` on, a line of JSON each, to its end."""
        lines = kept(run_id, request).follow(start)
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)

    @routes.delete("/searches/{run_id}")
    async def cancel(request: Request, run_id: str) -> dict[str, Any]:
        """Cancel a search. A search that has ended is not changed."""
        run = kept(run_id, request)
        if run.job is not None:
            run.job.cancel()
        return {"id": run_id, "state": run.state}

    @routes.get("/gauges")
    async def figures() -> dict[str, Any]:
        """Return the current figures of memory, transfers and token rates."""
        return {"gauges": list(gauges())}

    return routes


def page_routes() -> APIRouter:
    """Return the routes `/`, `/docs` and `/page/*`, which serve files read at startup."""
    routes = APIRouter(include_in_schema=False)
    folder = resources.files("beamwright.page") / "web"
    files = {part.name: part.read_bytes() for part in folder.iterdir() if part.is_file()}
    files["index.html"] = fill_page(_HEAD, "", title="Beamwright").encode()

    @routes.get("/")
    async def page() -> Response:
        return await part("index.html")

    @routes.get("/docs")
    async def docs() -> Response:
        return await part("docs.html")

    @routes.get("/page/{name}")
    async def part(name: str) -> Response:
        kind = _TYPES.get(name.rpartition(".")[2])
        if name not in files or kind is None:
            raise HTTPException(404, "no such file")
        return Response(files[name], media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    return routes
