"""The link between the host tier and the device: queued copies both ways, counted exactly.

On a CPU both tiers are RAM and a copier thread per direction moves the bytes while the model
computes. A throttled link waits until an emulated link of that bandwidth would have been done; it
is always labelled emulated. LBS section 4.1 (write-back while decoding) and 4.2 (prefetch).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch

from beamwright.errors import LinkError

_POLL_S = 0.2


class Direction(StrEnum):
    """Which way a transfer goes."""

    H2D = "h2d"
    D2H = "d2h"


@dataclass(frozen=True)
class Piece:
    """One contiguous (or strided) copy of equal-shaped arrays; None where nothing is stored."""

    destination: Any
    source: Any
    num_bytes: int


def as_array(memory: Any) -> np.ndarray[Any, Any]:
    """The same CPU memory as an array; bfloat16 goes as 16-bit integers."""
    if isinstance(memory, np.ndarray):
        return memory
    plain = memory.detach()
    view: np.ndarray[Any, Any] = (
        plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
    ).numpy()
    return view


class TransferState(StrEnum):
    """Where a transfer stands."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class Moved(Protocol):
    """What tells that a transfer has ended: an event of a thread, or of a stream."""

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
    emulated_bandwidth: bytes per second of a throttled link, None for the real one.
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


class CopierLink:
    """A background copier thread per direction, with an optional emulated bandwidth."""

    strided = True

    def __init__(
        self, emulated_bandwidth: int | None = None, timeline: SpanSink | None = None
    ) -> None:
        self.emulated_bandwidth = emulated_bandwidth
        self.bytes_moved: Counter[Direction] = Counter()
        self.busy_s: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.timeline = timeline
        self._lanes = {direction: _Lane(self, direction) for direction in Direction}

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        """See `Link`."""
        transfer = Transfer(direction, kind, pieces, sum(piece.num_bytes for piece in pieces))
        self._lanes[direction].put(transfer)
        return transfer

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """See `Link`."""
        start = time.perf_counter()
        for transfer in transfers:
            while not transfer.moved.wait(_POLL_S):
                self._lanes[transfer.direction].check()
            self._lanes[transfer.direction].check()
        return time.perf_counter() - start

    def order(self, transfers: Iterable[Transfer]) -> float:
        """See `Link`. Compute runs on the host, so the host waits."""
        pending = list(transfers)
        return self.wait(pending) if pending else 0.0

    def together(self) -> AbstractContextManager[None]:
        """See `Link`. A copier takes piece after piece anyway."""
        return nullcontext()

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """See `Link`."""
        for transfer in transfers:
            self._lanes[transfer.direction].cancel(transfer)

    def close(self) -> None:
        """See `Link`."""
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    """One direction: a queue and the thread that empties it. The thread starts with use."""

    def __init__(self, link: CopierLink, direction: Direction) -> None:
        self._link, self._direction = link, direction
        self._queue: deque[Transfer] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._free_at_s = 0.0

    def put(self, transfer: Transfer) -> None:
        with self._changed:
            self.check()
            if self._thread is None or not self._thread.is_alive():
                self._closed = False
                self._thread = threading.Thread(
                    target=self._work, name=f"copier-{self._direction}", daemon=True
                )
                self._thread.start()
            self._queue.append(transfer)
            self._changed.notify_all()

    def cancel(self, transfer: Transfer) -> None:
        with self._changed:
            if transfer.state is TransferState.QUEUED:
                transfer.state = TransferState.CANCELLED
                transfer.moved.set()
                return
            if transfer.state is TransferState.RUNNING:
                transfer.state = TransferState.CANCELLED
        while not transfer.moved.wait(_POLL_S):
            if self._thread is None or not self._thread.is_alive():
                return

    def check(self) -> None:
        if self._failure is not None:
            raise LinkError(f"the {self._direction} copier failed: {self._failure!r}")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for transfer in self._queue:
                transfer.state = TransferState.CANCELLED
                transfer.moved.set()
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._failure = None, None

    def _work(self) -> None:
        transfer: Transfer | None = None
        try:
            while (transfer := self._next()) is not None:
                self._move(transfer)
        except BaseException as error:  # whatever it is, waiting threads must hear of it
            with self._changed:
                self._failure = error
                for each in [*([transfer] if transfer else []), *self._queue]:
                    each.state = TransferState.CANCELLED
                    each.moved.set()
                self._queue.clear()

    def _next(self) -> Transfer | None:
        with self._changed:
            while True:
                while self._queue:
                    transfer = self._queue.popleft()
                    if transfer.state is TransferState.QUEUED:
                        transfer.state = TransferState.RUNNING
                        return transfer
                if self._closed:
                    return None
                self._changed.wait()

    def _move(self, transfer: Transfer) -> None:
        start = time.perf_counter()
        moved = 0
        for piece in transfer.pieces:
            if transfer.state is TransferState.CANCELLED:
                break
            self._copy(piece)
            moved += piece.num_bytes
        self._throttle(moved, start, transfer)
        end = time.perf_counter()
        self._link.bytes_moved[self._direction] += moved
        self._link.busy_s[self._direction] += end - start
        if self._link.timeline is not None and moved:
            self._link.timeline.add(
                transfer.kind, str(self._direction), start, end, bytes=moved, kind=transfer.kind
            )
        if transfer.state is TransferState.RUNNING:
            transfer.state = TransferState.DONE
        transfer.moved.set()

    def _copy(self, piece: Piece) -> None:
        np.copyto(as_array(piece.destination), as_array(piece.source))

    def _throttle(self, num_bytes: int, start_s: float, transfer: Transfer) -> None:
        """Sleep until the emulated link would have moved this many bytes."""
        if self._link.emulated_bandwidth is None:
            return
        begun = max(start_s, self._free_at_s)
        self._free_at_s = begun + num_bytes / self._link.emulated_bandwidth
        while (left := self._free_at_s - time.perf_counter()) > 0:
            if transfer.state is TransferState.CANCELLED:
                self._free_at_s = time.perf_counter()
                return
            time.sleep(min(left, 0.005))
