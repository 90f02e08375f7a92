"""Runs an application in one process until it is told to end; then everybody gets their answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from beamwright.errors import InputError
from beamwright.serve.connection import Connection
from beamwright.serve.desk import Desk

_BACKLOG = 2048


class Server(uvicorn.Server):
    """Ends in order: SIGTERM or Ctrl-C stops new searches and waits for those that run; a second
    one ends these with the best so far."""

    def __init__(self, config: uvicorn.Config, desk: Desk) -> None:
        super().__init__(config)
        self._desk = desk
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
            self._desk.hurry()
            return
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._desk.drain()
        self.should_exit = True


def make_server(app: ASGIApp, desk: Desk) -> Server:
    """A server that is not running yet."""
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
    return Server(config, desk)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one.

    Raises:
        InputError: if it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(_BACKLOG)  # whoever is told of it may come at once
    except (OSError, OverflowError) as error:
        found.close()
        what = error.strerror if isinstance(error, OSError) else "no such port"
        raise InputError(f"--host {host} --port {port}: {what}") from error
    return found


def run(app: ASGIApp, desk: Desk, listening: socket.socket, started: Callable[[], None]) -> None:
    """Serve on this socket. started: called when it listens."""
    server = make_server(app, desk)
    started()
    asyncio.run(server.serve(sockets=[listening]))
