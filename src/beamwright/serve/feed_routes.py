"""HTTP for the live page: its feed, and its files under a strict content security policy.

The feed is lines of JSON that are read with `fetch`, so that a key goes into the Authorization
header. Keys, hosts and origins are checked before anything gets here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from beamwright.search import STRATEGIES
from beamwright.serve.body import parsed, read_body
from beamwright.serve.errors import AsciiJSON
from beamwright.serve.feed import Feed, SearchEvents
from beamwright.serve.guard import owner_of
from beamwright.serve.runs import filled_page

if TYPE_CHECKING:
    from beamwright.serve.queue import RequestQueue

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        *(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")),
    ]
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

Gauges = Callable[[], Sequence[Mapping[str, Any]]]
"""Figures of the moment, in the order in which they are shown: {name, value, unit?, of?}, or
{name, total, unit?} for what only grows and is shown per second. unit: "bytes" or a word; of: what
the value is at most. A value that is None is not shown."""


class FeedProblem(BaseModel):
    """A problem for a search; options: of the `search` object of a chat completion."""

    model_config = ConfigDict(extra="forbid")

    problem: str = Field(strict=True, min_length=1)
    options: dict[str, Any] = {}


# Read by hand, for its limits, and declared all the same.
_BODY = {
    "required": True,
    "content": {"application/json": {"schema": FeedProblem.model_json_schema()}},
}


def feed_routes(feed: Feed, queue: RequestQueue | None, gauges: Gauges = tuple) -> APIRouter:
    """`/feed/*`. queue: None where runs can only be looked at."""
    routes = APIRouter(prefix="/feed", tags=["feed"])

    def kept(run_id: str, request: Request) -> SearchEvents:
        run = feed.run(run_id)
        if run is None or run.owner != owner_of(request):
            raise HTTPException(404, "no such search, or an old one that is not kept any more")
        return run

    @routes.get("/searches")
    async def searches(request: Request) -> Response:
        """What is running, waiting, or over, the newest first; of this key alone."""
        mine = [run.summary() for run in feed.runs() if run.owner == owner_of(request)]
        asks, methods = queue is not None, list(STRATEGIES)
        return AsciiJSON({"asks": asks, "methods": methods, "searches": mine})

    @routes.post("/searches", openapi_extra={"requestBody": _BODY})
    async def ask(request: Request) -> dict[str, Any]:
        """Begin a search."""
        if queue is None:
            raise HTTPException(405, "saved runs can only be looked at")
        given = await read_body(request, queue.limits, partial(parsed, FeedProblem))
        job = await queue.begin_search(given.problem, given.options, owner_of(request))
        return {"id": job.id}

    @routes.get("/searches/{run_id}")
    async def follow(
        request: Request, run_id: str, start: Annotated[int, Query(alias="from", ge=0)] = 0
    ) -> StreamingResponse:
        """Its events from a number on, a line of JSON each, until it is over."""
        lines = kept(run_id, request).follow(start)
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)

    @routes.delete("/searches/{run_id}")
    async def cancel(request: Request, run_id: str) -> dict[str, Any]:
        """Give it up. One that is over stays as it is."""
        run = kept(run_id, request)
        if run.job is not None and not run.ended:
            run.job.cancel()
        return {"id": run_id, "state": run.state}

    @routes.get("/gauges")
    async def figures() -> dict[str, Any]:
        """Memory, link and rates as they are now, where they are known."""
        known = [gauge for gauge in gauges() if gauge.get("value", gauge.get("total")) is not None]
        return {"gauges": known}

    return routes


def page_routes() -> APIRouter:
    """`/`, `/docs` and `/page/*`: the pages' files, read once."""
    routes = APIRouter(include_in_schema=False)
    folder = resources.files("beamwright.serve") / "page"
    files = {part.name: part.read_bytes() for part in folder.iterdir() if part.is_file()}
    files["index.html"] = filled_page(_HEAD, "", title="Beamwright").encode()

    def served(name: str) -> Response:
        kind = _TYPES.get(name.rpartition(".")[2])
        if name not in files or kind is None:
            raise HTTPException(404, "no such file")
        return Response(files[name], media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    @routes.get("/")
    async def page() -> Response:
        return served("index.html")

    @routes.get("/docs")
    async def docs() -> Response:
        return served("docs.html")

    @routes.get("/page/{name}")
    async def part(name: str) -> Response:
        return served(name)

    return routes
