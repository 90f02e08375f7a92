"""Connection: HTTP over one socket, from a client that may have no good in mind."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

READ_BYTES = 16 * 1024
"""Read at a time. A chunk of a byte takes the parser 60 us, and the event loop has others, too."""

HEAD_S = 30.0
"""Seconds that the head of a request may take to come, from its connection or first byte on."""


class Connection(H11Protocol):
    """uvicorn's, which waits without end for the head of a request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has come."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's own: 256 KiB
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """More of a head or a body."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
