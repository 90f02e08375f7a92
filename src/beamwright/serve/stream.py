"""Server-sent events: sent while somebody listens, with comments where they are silent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

QUIET_S = 10.0
"""Silence after which a comment tells a client, and what stands between, that something happens."""


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
        leaving = asyncio.create_task(until_gone(receive))
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
        async for event in with_comments(self._events):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_comments(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
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
                found = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield found
    finally:
        if waiting is not None:
            waiting.cancel()


def event(data: Mapping[str, Any]) -> bytes:
    """One event; ASCII, so that no character can be cut."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"
