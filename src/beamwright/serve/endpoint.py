"""Endpoint: one route that answers by searches, whole or as server-sent events.

An endpoint is a file in this package with a subclass of `Endpoint`: it turns a body into searches
and their solutions into a reply. A subclass that names a `path` is served without further mention.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from beamwright.io import nonfinite_as_null
from beamwright.serve.answers import search_facts
from beamwright.serve.body import ApiError, AsciiJSON, api_error, log, read_body
from beamwright.serve.job import SearchJob
from beamwright.serve.queue import RequestQueue
from beamwright.serve.server import owner_of

COMMENT, QUIET_S = b": keep-alive\n\n", 10.0
"""Sent after so many silent seconds, so that neither client nor proxy takes the stream for dead."""


ENDPOINTS: list[type[Endpoint]] = []
"""Every imported subclass of `Endpoint` that names a path."""


class Endpoint(ABC):
    """One request to a route, and its reply. takes: model of the body; end: last bytes of every
    stream. An endpoint that never streams needs neither `parts` nor `failed`."""

    path: ClassVar[str]
    takes: ClassVar[type[BaseModel]]
    end: ClassVar[bytes] = b""

    def __init_subclass__(cls) -> None:
        """Declare the subclass as an endpoint if it names a path."""
        if "path" in vars(cls):
            ENDPOINTS.append(cls)

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.jobs: list[SearchJob] = []
        self.streamed = False

    @abstractmethod
    def read(self, body: dict[str, Any]) -> list[SearchJob]:
        """Turn a body into jobs, in a thread. Raises ApiError."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Build the whole reply once all jobs are done."""

    def parts(self) -> AsyncIterator[bytes]:
        """Yield the events of running jobs; raises what goes wrong."""
        raise NotImplementedError

    def facts(self, job: SearchJob) -> dict[str, Any]:
        """Describe a search, beside OpenAI's fields."""
        return search_facts(job, receipt=self.queue.receipts)

    def failed(self, error: ApiError) -> bytes:
        """Build the event of a failure."""
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        """Begin all searches or none, and reply."""
        self.jobs = await read_body(request, self.queue.limits, self.read)
        try:
            for job in self.jobs:
                await self.queue.begin(job, owner_of(request))
        except BaseException:
            self._cancel()
            raise
        if self.streamed:
            return EventStream(self._events(), self._cancel)
        await self._finish(request)
        return AsciiJSON(self.whole())

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for part in _with_comments(self.parts()):
                yield part
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("%s", self.jobs[0].id, exc_info=error)
            yield self.failed(api_error(error))
        finally:
            self._cancel()
        yield self.end

    async def _finish(self, request: Request) -> None:
        """Wait for all jobs; cancel the others where one fails or the client disconnects."""
        gone: asyncio.Future[None] = asyncio.ensure_future(_until_gone(request.receive))
        solving: asyncio.Future[Any] = asyncio.gather(*(job.solution() for job in self.jobs))
        try:
            await asyncio.wait({gone, solving}, return_when=asyncio.FIRST_COMPLETED)
            if not solving.done():
                raise ApiError(499, "the client has gone", code="cancelled")
            solving.result()
        finally:
            self._cancel()
            gone.cancel()
            solving.cancel()
            await asyncio.gather(gone, solving, return_exceptions=True)  # or asyncio complains

    def _cancel(self) -> None:
        """Cancel the jobs that still run."""
        for job in self.jobs:
            job.cancel()


async def _with_comments(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(parts))
            done, _ = await asyncio.wait({waiting}, timeout=QUIET_S)
            if not done:
                yield COMMENT
                continue
            try:
                part = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield part
    finally:
        if waiting is not None:
            waiting.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Send what an iterator yields. gone: called at the end, or when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], gone: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-store"})
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of one response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._gone()  # its events may not have begun


def event(data: Mapping[str, Any]) -> bytes:
    """Encode one event in ASCII, so that no character can be cut."""
    return b"data: " + json.dumps(nonfinite_as_null(data), allow_nan=False).encode() + b"\n\n"
