"""The base class of routes that answer by searches, with one reply or server-sent events.

To add an endpoint, put a file with a subclass of `Endpoint` into this package. The subclass turns a
request's body into searches, and their solutions into a reply. `app` serves every subclass that
sets `path`.
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

# Comment line that is sent after `QUIET_S` seconds without an event, so that neither the client nor
# a proxy closes the stream as dead.
COMMENT, QUIET_S = b": keep-alive\n\n", 10.0


# Every imported subclass of `Endpoint` that sets `path`; `app` serves all of them.
ENDPOINTS: list[type[Endpoint]] = []


class Endpoint(ABC):
    """Handler of one request: reads the body, begins the searches, and builds the reply.

    path: the route. takes: the pydantic model of the body. end: the last bytes of every stream.
    An endpoint that never streams needs neither `stream_events` nor `error_event`.
    """

    path: ClassVar[str]
    takes: ClassVar[type[BaseModel]]
    end: ClassVar[bytes] = b""

    def __init_subclass__(cls) -> None:
        """Add the subclass to `ENDPOINTS` if it sets `path`."""
        if "path" in vars(cls):
            ENDPOINTS.append(cls)

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.jobs: list[SearchJob] = []
        self.streamed = False

    @abstractmethod
    def make_jobs(self, body: dict[str, Any]) -> list[SearchJob]:
        """Turn a body into search jobs; called in a thread. Raises ApiError for a bad body."""

    @abstractmethod
    def build_reply(self) -> dict[str, Any]:
        """Build the reply to a request without a stream, once all jobs are done."""

    def stream_events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events of a stream while the jobs run; raise a failed job's error."""
        raise NotImplementedError

    def facts(self, job: SearchJob) -> dict[str, Any]:
        """Return the `search` object of a reply, an addition to OpenAI's format."""
        return search_facts(job, receipt=self.queue.receipts)

    def error_event(self, error: ApiError) -> bytes:
        """Build the event that tells a client of an error in the middle of a stream."""
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        """Begin the searches and reply. If a search cannot begin, cancel the others."""
        self.jobs = await read_body(request, self.queue.limits, self.make_jobs)
        try:
            for job in self.jobs:
                await self.queue.begin(job, owner_of(request))
        except BaseException:
            self._cancel()
            raise
        if self.streamed:
            return EventStream(self._events(), self._cancel)
        await self._finish(request)
        return AsciiJSON(self.build_reply())

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for part in _with_comments(self.stream_events()):
                yield part
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("%s", self.jobs[0].id, exc_info=error)
            yield self.error_event(api_error(error))
        finally:
            self._cancel()
        yield self.end

    async def _finish(self, request: Request) -> None:
        """Wait for all jobs. If one fails or the client disconnects, cancel the rest."""
        gone: asyncio.Future[None] = asyncio.ensure_future(_until_gone(request.receive))
        solving: asyncio.Future[Any] = asyncio.gather(*(job.solution() for job in self.jobs))
        try:
            await asyncio.wait({gone, solving}, return_when=asyncio.FIRST_COMPLETED)
            if not solving.done():
                raise ApiError(499, "the client disconnected", code="cancelled")
            solving.result()
        finally:
            self._cancel()
            gone.cancel()
            solving.cancel()
            # Read the exceptions of both tasks: asyncio logs exceptions that were never read.
            await asyncio.gather(gone, solving, return_exceptions=True)

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
    """A response that sends the events of an iterator as server-sent events.

    gone: called when the response has ended or the client has disconnected.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], gone: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-store"})
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application, and call `gone` afterwards."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A `finally` block of the iterator is not enough: it never runs if the client has
            # disconnected before the first event.
            self._gone()


def format_event(data: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event in ASCII, so that no chunk can end inside a character."""
    return b"data: " + json.dumps(nonfinite_as_null(data), allow_nan=False).encode() + b"\n\n"
