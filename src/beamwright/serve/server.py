"""Runs an application in one process, on a socket whose clients may have no good in mind, until it
is told to end; then everybody gets their answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from beamwright.errors import InputError

if TYPE_CHECKING:
    from beamwright.serve.queue import RequestQueue

READ_BYTES = 16 * 1024
"""Read at a time. A chunk of a byte takes the parser 60 us, and the event loop has others, too."""

HEAD_S = 30.0
"""Seconds that the head of a request may take to come, from its connection or first byte on."""

MOST_CONNECTIONS = 512
"""At a time. One more takes the place of the one without a request that has been silent longest;
where all have one it is closed."""


class Connection(H11Protocol):
    """HTTP over one socket: uvicorn's, which waits without end for the head of a request."""

    _late: asyncio.TimerHandle | None = None
    _heard_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has come."""
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS:
            others = [other for other in self.connections if isinstance(other, Connection)]
            idle = [other for other in others if other._is_idle]  # this one, where no other is
            min(idle, key=lambda other: other._heard_s).transport.close()
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's own: 256 KiB
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """More of a head or a body."""
        self._heard_s = self.loop.time()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._in_time()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        done = self.cycle is None or self.cycle.response_complete
        return done and not self.transport.is_closing()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """Ends in order: SIGTERM or Ctrl-C stops new searches and waits for those that run; a second
    one ends these with the best so far."""

    def __init__(self, app: ASGIApp, queue: RequestQueue) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=10,
            h11_max_incomplete_event_size=65536,
        )
        super().__init__(config)
        self._queue = queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: object) -> None:
        """uvicorn's handler of signals; by any thread."""
        del sig, frame
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to end."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def _end(self) -> None:
        if self._draining is not None:
            self._queue.hurry()
            return
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._queue.drain()
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one.

    Raises:
        InputError: if it cannot.
    """
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    both = is_v6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {reason}") from error


def run(
    app: ASGIApp, queue: RequestQueue, listening: socket.socket, started: Callable[[], None]
) -> None:
    """Serve on this socket. started: called when it listens."""
    server = Server(app, queue)
    started()
    asyncio.run(server.serve(sockets=[listening]))
