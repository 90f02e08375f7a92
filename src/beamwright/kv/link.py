"""The link between the host tier and the device: queued copies both ways, counted exactly.

What a link promises, and the tickets that it gives. `stream_link` keeps it, and so does the
simulator's. LBS section 4.1 (write-back while decoding) and 4.2 (prefetch).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from beamwright.protocols import Direction


@dataclass(frozen=True)
class Piece:
    """One contiguous (or strided) copy of equal-shaped arrays; None where nothing is stored."""

    destination: Any
    source: Any
    num_bytes: int


class TransferState(StrEnum):
    """What has become of a transfer."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class Moved(Protocol):
    """What shows that a transfer has ended: an event of a thread, or of a stream."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass(eq=False)
class Transfer:
    """A ticket: pieces that move together. kind: "load", "prefetch", "store" or "stream"."""

    direction: Direction
    kind: str
    pieces: Sequence[Piece]
    num_bytes: int
    state: TransferState = TransferState.QUEUED
    moved: Moved = field(default_factory=threading.Event)

    @property
    def finished(self) -> bool:
        """True once the pieces have moved, or never will."""
        return self.moved.is_set()


class SpanSink(Protocol):
    """What records when a transfer ran (a timeline)."""

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Any) -> None: ...


class Link(Protocol):
    """Moves pieces between the tiers, in order per direction, both directions at once.

    bytes_moved: by direction; busy_s: seconds in which a direction was moving.
    emulated_bandwidth: bytes per second of a throttled link, always labelled emulated; None for
        the real one.
    strided: pieces need not be contiguous.
    """

    strided: bool
    bytes_moved: Counter[Direction]
    busy_s: dict[Direction, float]
    emulated_bandwidth: int | None

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        """Queue a transfer."""
        ...

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Return when all have finished; gives the seconds that it took.

        Raises:
            LinkError: if the link has failed.
        """
        ...

    def order(self, transfers: Iterable[Transfer]) -> float:
        """Compute that starts from here on finds these finished; gives the seconds of waiting.

        Raises:
            LinkError: if the link has failed.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is submitted inside may be moved as one batch per direction."""
        ...

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """Forget what has not started, and wait for the piece that is on its way."""
        ...

    def close(self) -> None:
        """Stop; queued transfers are forgotten."""
        ...
