"""Connection: HTTP over one socket, from a client that may have no good in mind."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

READ_BYTES = 16 * 1024
"""Read at a time. A chunk of a byte takes the parser 60 us, and the event loop has others, too."""

HEAD_S = 30.0
"""Seconds that the head of a request may take to come, from its connection or first byte on."""

MOST = 512
"""Connections at a time. One more takes the place of the one without a request that has been
silent longest; where all have one it is closed."""


class Connection(H11Protocol):
    """uvicorn's, which waits without end for the head of a request."""

    _late: asyncio.TimerHandle | None = None
    _heard_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has come."""
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        if len(self.connections) > MOST:
            self._make_room()
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

    def _make_room(self) -> None:
        """Close the idle connection that was heard longest ago: this one, where no other is."""
        everybody = [each for each in self.connections if isinstance(each, Connection)]
        idle = [each for each in everybody if each._is_idle]
        min(idle, key=lambda each: each._heard_s).transport.close()

    @property
    def _is_idle(self) -> bool:
        done = self.cycle is None or self.cycle.response_complete
        return done and not self.transport.is_closing()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
