"""Endpoint: one route that answers by searches, whole or as server-sent events.

An endpoint is a file with a subclass: its fields, what is searched for them, and how a reply is
written. `app.ENDPOINTS` names it.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from beamwright.serve.answers import Answer, answers_of
from beamwright.serve.body import Fields, read_body
from beamwright.serve.errors import ApiError, AsciiJSON, told_error
from beamwright.serve.guard import owner_of
from beamwright.serve.job import SearchJob
from beamwright.serve.queue import RequestQueue

F = TypeVar("F", bound=Fields)

QUIET_S = 10.0
"""Silence after which a comment tells a client, and what stands between, that something happens."""


class Endpoint(ABC, Generic[F]):
    """One route. fields: of its body."""

    path: ClassVar[str]
    fields: type[F]

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue

    @abstractmethod
    def read(self, body: dict[str, Any]) -> tuple[F, list[SearchJob]]:
        """What a body asks for, in a thread. Raises ApiError."""

    @abstractmethod
    def whole(self, fields: F, jobs: Sequence[SearchJob]) -> dict[str, Any]:
        """The reply of jobs that are done."""

    @abstractmethod
    def stream(self, fields: F, jobs: Sequence[SearchJob]) -> ReplyStream:
        """The reply of jobs that are under way."""

    def answers(self, job: SearchJob) -> list[Answer]:
        """Of a job that is done; bytes of tokens are looked up where they are needed alone."""
        needs_tokens = job.top_logprobs is not None or job.stops
        return answers_of(job, self.queue.token_bytes if needs_tokens else ())

    async def respond(self, request: Request) -> Response:
        """One request. All of its searches begin, or none."""
        fields, jobs = await read_body(request, self.queue.limits, self.read)
        try:
            for job in jobs:
                await self.queue.begin(job, owner_of(request))
        except BaseException:
            cancel_all(jobs)
            raise
        if fields.stream:
            stream = self.stream(fields, jobs)
            return EventStream(stream.events(), lambda: cancel_all(jobs))
        await self._finish(request, jobs)
        return AsciiJSON(self.whole(fields, jobs))

    async def _finish(self, request: Request, jobs: Sequence[SearchJob]) -> None:
        """Wait for all; where one fails, or the client has gone, the others are cancelled."""
        gone: asyncio.Future[None] = asyncio.ensure_future(_until_gone(request.receive))
        solving: asyncio.Future[Any] = asyncio.gather(*(job.solution() for job in jobs))
        try:
            await asyncio.wait({gone, solving}, return_when=asyncio.FIRST_COMPLETED)
            if not solving.done():
                raise ApiError(499, "the client has gone", code="cancelled")
            solving.result()
        finally:
            cancel_all(jobs)
            gone.cancel()
            solving.cancel()
            await asyncio.gather(gone, solving, return_exceptions=True)  # or asyncio complains


def cancel_all(jobs: Sequence[SearchJob]) -> None:
    """Those that have ended stay as they are."""
    for job in jobs:
        job.cancel()


# --- streams ---------------------------------------------------------------------------------


class ReplyStream(ABC):
    """The events of one reply: text that is final, and an end in any case."""

    end: ClassVar[bytes] = b""

    def __init__(self, jobs: Sequence[SearchJob]) -> None:
        self.jobs = jobs

    @abstractmethod
    def parts(self) -> AsyncIterator[bytes]:
        """All events, as long as nothing goes wrong."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The event that says what did."""

    async def events(self) -> AsyncIterator[bytes]:
        """From the first to the last."""
        try:
            async for part in self.parts():
                yield part
        except Exception as error:
            yield self.failed(told_error(error, self.jobs[0].id))
        finally:
            cancel_all(self.jobs)
        yield self.end


def event(data: Mapping[str, Any]) -> bytes:
    """One event; ASCII, so that no character can be cut."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends what an iterator yields; closes it when the client has gone.

    gone: called then, and at the end in any case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], gone: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events, self._gone = events, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of one response."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # or what went wrong
        finally:
            self._gone()
            leaving.cancel()
            sending.cancel()
            with suppress(BaseException):
                await sending

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for part in _with_comments(self._events):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_comments(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, with a comment where it is silent."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=QUIET_S)
            if not done:
                yield b": keep-alive\n\n"
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
