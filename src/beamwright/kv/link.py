"""Link: asynchronous copies of KV between device and host, in both directions, with byte counts.

This module defines `Link`, the transfers that it returns, and `StreamLink`, which implements it
over any `Streams`: CUDA streams, or threads that copy while a CPU computes (`streams`). The
simulator has a link on a virtual clock. See LBS sections 4.1 (write-back while decoding) and 4.2
(prefetch).

Three races corrupt KV if copies and compute are not ordered: a store that runs before the compute
that writes its block, a load into a block that earlier compute still reads, and compute that reads
a block before its load. Every copy therefore starts after all compute that was queued when it was
submitted. A reader of the copied data either waits for the copy on the host (`wait`) or makes later
compute wait for it (`delay_compute`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from beamwright.errors import LinkError
from beamwright.kv.streams import ComputeDelay, CopyHandle, Piece, Streams
from beamwright.protocols import Direction

_Answer = TypeVar("_Answer")

_PLACES = {Direction.H2D: "device", Direction.D2H: "host"}


class TransferState(StrEnum):
    """State of a transfer."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class Transfer:
    """Handle of one queued transfer, which may consist of several pieces.

    kind: name in counters and timelines: "load", "prefetch", "store", "stream" or "select" for KV,
        "weights" for weights.
    """

    direction: Direction
    kind: str
    num_bytes: int
    state: TransferState = TransferState.QUEUED

    @property
    def finished(self) -> bool:
        """True once all pieces have arrived, or the transfer is cancelled."""
        return self.state in (TransferState.DONE, TransferState.CANCELLED)


class TransferTimeline(Protocol):
    """Timeline that records transfers, and when compute waited for them."""

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Any) -> None: ...

    def span(self, name: str, track: str, **args: Any) -> AbstractContextManager[Any]: ...


class Link(Protocol):
    """Interface that queues transfers. They run in order per direction, both directions at once.

    strided: True if pieces need not be contiguous in memory.
    bytes_moved: bytes transferred so far, by direction.
    """

    strided: bool
    bytes_moved: Counter[Direction]

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        """Queue a transfer after all compute that is queued so far."""

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Block the host until these transfers have finished; return the seconds that this took.

        Raises:
            LinkError: if the link has failed.
        """

    def delay_compute(self, transfers: Iterable[Transfer]) -> float:
        """Make compute that is queued from now on wait for these transfers; do not block the host.

        Return the seconds that compute was found to have waited since the last call.

        Raises:
            LinkError: if the link has failed.
        """

    def batch_transfers(self) -> AbstractContextManager[None]:
        """Return a context manager that batches the transfers submitted in it, per direction."""

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """Cancel transfers that have not started, and wait for pieces that are moving."""

    def close(self) -> None:
        """Stop the link, and cancel queued transfers."""


class Wire:
    """Byte counter of one physical link, which several threads' `StreamLink`s may share.

    With an emulated bandwidth it also computes when transfers begin and arrive.

    emulated_bandwidth: bytes per second in each direction, shared by all links over this wire;
        None: transfers are not slowed down.
    """

    def __init__(self, emulated_bandwidth: int | None = None) -> None:
        self.emulated_bandwidth = emulated_bandwidth
        self.bytes_moved: Counter[Direction] = Counter()
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._lock = threading.Lock()

    def add_transfer(
        self, direction: Direction, num_bytes: int, now_s: float
    ) -> tuple[float, float]:
        """Count bytes that are queued now; return when their emulated transfer begins and ends.

        Both times are 0 without an emulated bandwidth.
        """
        with self._lock:
            self.bytes_moved[direction] += num_bytes
            if self.emulated_bandwidth is None:
                return 0.0, 0.0
            begins_s = max(now_s, self._free_at_s[direction])
            ends_s = begins_s + num_bytes / self.emulated_bandwidth
            self._free_at_s[direction] = ends_s
            return begins_s, ends_s

    def with_own_counter(self) -> Wire:
        """Return the same physical link with a byte counter of its own, for other data than KV."""
        own = copy(self)  # shares the lock and the times of the emulated bandwidth
        own.bytes_moved = Counter()
        return own

    def remove_transfer(self, direction: Direction, num_bytes: int, seconds: float) -> None:
        """Subtract bytes of cancelled transfers, and the seconds reserved for them."""
        with self._lock:
            self.bytes_moved[direction] -= num_bytes
            self._free_at_s[direction] -= seconds


@dataclass(eq=False)
class StreamTransfer(Transfer):
    """A transfer over `Streams`. It has finished once its copies have, and `ends_s` has passed.

    copied: handle of the copies of its batch; None until the batch is queued.
    begins_s, ends_s: when an emulated link begins and ends the transfer; 0 on a real link.
    unmoved: bytes that were cancelled before they moved.
    ended: True once `finished` was true, so that it need not be computed again.
    error: why the copies failed; None if they did not.
    """

    pieces: Sequence[Piece] = ()
    copied: CopyHandle | None = None
    submitted_s: float = 0.0
    begins_s: float = 0.0
    ends_s: float = 0.0
    unmoved: int = 0
    ended: bool = False
    error: RuntimeError | None = None

    @property
    def finished(self) -> bool:
        if not self.ended and self.copied is not None:
            over = self._ask_copies(self.copied.query) and time.perf_counter() >= self.ends_s
            self.ended = self.ended or bool(over)
        return self.ended

    def _ask_copies(self, question: Callable[[], _Answer]) -> _Answer | None:
        """Call `question` about the copies. If they have failed, set `error` and return None."""
        try:
            return question()
        except RuntimeError as error:
            self.ended, self.error = True, error
            return None

    def wait(self) -> None:
        """Block the host until the bytes have arrived."""
        if self.ended:
            return
        assert self.copied is not None, "a transfer is waited for before it is queued"
        self._ask_copies(self.copied.synchronize)
        left = self.ends_s - time.perf_counter()
        if left > 0 and self.error is None:
            time.sleep(left)
        self.ended = True

    def delay_compute(self, streams: Streams) -> ComputeDelay | None:
        """Make compute that is queued from now on wait for these copies; None if they failed."""
        copied = self.copied
        assert copied is not None
        return self._ask_copies(lambda: streams.delay_compute(copied))

    def cancel(self, wire: Wire) -> None:
        """Cancel copies that have not begun, and wait for the others.

        On an emulated link, no copy counts as begun before `begins_s`.
        """
        assert self.copied is not None
        self.unmoved = self._ask_copies(self.copied.cancel) or 0
        now_s = time.perf_counter()
        if now_s < self.begins_s:
            self.unmoved = self.num_bytes
        self.ended = True
        left_s = self.ends_s - max(now_s, self.begins_s)
        wire.remove_transfer(self.direction, self.unmoved, max(0.0, left_s))


class StreamLink:
    """A `Link` over `Streams`. It counts bytes when they are queued, less those cancelled in time.

    Only one thread at a time may call it. Threads that compute at once have a link each, over one
    shared `wire`, which counts the bytes of all.

    held_back_s: seconds that `delay_compute` made compute wait, as far as the device has reported.
    """

    def __init__(
        self,
        streams: Streams,
        emulated_bandwidth: int | None = None,
        timeline: TransferTimeline | None = None,
        *,
        wire: Wire | None = None,
    ) -> None:
        self.strided = streams.strided
        self.wire = wire or Wire(emulated_bandwidth)
        self.bytes_moved = self.wire.bytes_moved
        self.held_back_s = 0.0
        self.timeline = timeline
        self._streams = streams
        self._underway: list[StreamTransfer] = []
        self._held: list[ComputeDelay] = []
        self._reported_s = 0.0
        self._gathering = 0
        self._gathered: list[StreamTransfer] = []

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        transfer = StreamTransfer(direction, kind, num_bytes, pieces=pieces)
        self._gathered.append(transfer)
        if not (self._gathering and self._streams.batches):
            self._queue()
        return transfer

    @contextmanager
    def batch_transfers(self) -> Iterator[None]:
        """Queue the transfers submitted in this context at its end, one batch per direction.

        Waiting for one of these transfers ends the batch early.
        """
        self._gathering += 1
        try:
            yield
        finally:
            self._gathering -= 1
            if not self._gathering:
                self._queue()

    def wait(self, transfers: Iterable[Transfer]) -> float:
        start = time.perf_counter()
        self._queue()
        pending = _stream_transfers(transfers)
        for transfer in pending:
            transfer.wait()
        self._update_ended(pending)
        return time.perf_counter() - start

    def delay_compute(self, transfers: Iterable[Transfer]) -> float:
        """Make compute wait for these transfers; return the seconds reported since the last call.

        The host waits too if it computes itself (CPU), or if the link is emulated.
        """
        pending = _stream_transfers(transfers)
        if self.wire.emulated_bandwidth is not None:
            return self.wait(pending) if pending else 0.0
        self._queue()
        latest = {transfer.direction: transfer for transfer in pending if not transfer.finished}
        for transfer in latest.values():  # copies of a direction end in order: the last suffices
            if (held := transfer.delay_compute(self._streams)) is not None:
                self._held.append(held)
        self._update_ended(pending)
        newly_known_s, self._reported_s = self.held_back_s - self._reported_s, self.held_back_s
        return newly_known_s

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """Cancel copies that have not begun, and wait for others, so that blocks can be reused."""
        self._queue()
        for transfer in _stream_transfers(transfers):
            if not transfer.finished:
                transfer.cancel(self.wire)
                transfer.state = TransferState.CANCELLED
        self._update_ended([])

    def close(self) -> None:
        self._queue()
        self._streams.close()
        for transfer in self._underway:
            if transfer.state is not TransferState.CANCELLED:
                transfer.cancel(self.wire)  # sets `unmoved`: the bytes cancelled before they moved
                if transfer.unmoved:
                    transfer.state = TransferState.CANCELLED
        self._update_ended([])

    # --- inside ------------------------------------------------------------------------------

    def _queue(self) -> None:
        """Queue the gathered transfers on the streams, one batch per direction."""
        gathered, self._gathered = self._gathered, []
        for direction in dict.fromkeys(transfer.direction for transfer in gathered):
            batch = [transfer for transfer in gathered if transfer.direction is direction]
            pieces = [piece for transfer in batch for piece in transfer.pieces]
            try:
                copied = self._streams.copy(direction, pieces)
            except RuntimeError as error:
                for transfer in gathered:
                    if transfer.copied is None:
                        transfer.state, transfer.ended = TransferState.CANCELLED, True
                raise _link_error(batch[0], error) from error
            now = time.perf_counter()
            for transfer in batch:
                taken = self.wire.add_transfer(direction, transfer.num_bytes, now)
                transfer.begins_s, transfer.ends_s = taken
                transfer.copied, transfer.submitted_s = copied, now
                transfer.state = TransferState.RUNNING
            self._underway += batch

    def _update_ended(self, waited_for: Iterable[StreamTransfer]) -> None:
        """Update states of transfers that have ended; raise if one in `waited_for` has failed."""
        batches: dict[int, list[StreamTransfer]] = {}
        for transfer in self._underway:
            batches.setdefault(id(transfer.copied), []).append(transfer)
        self._underway = []
        for batch in batches.values():
            if all(transfer.finished for transfer in batch):
                self._finish_batch(batch)
            else:
                self._underway += batch
        waiting = [(held, held()) for held in self._held]
        self.held_back_s += sum(seconds for _, seconds in waiting if seconds is not None)
        self._held = [held for held, seconds in waiting if seconds is None]
        for transfer in waited_for:
            if transfer.error is not None:
                raise _link_error(transfer, transfer.error) from transfer.error

    def _finish_batch(self, batch: Sequence[StreamTransfer]) -> None:
        """Mark a batch's transfers as done, and log one span for all: they ran as one copy."""
        for transfer in batch:
            if transfer.state is TransferState.RUNNING:
                failed = transfer.error is not None
                transfer.state = TransferState.CANCELLED if failed else TransferState.DONE
        first = batch[0]
        num_bytes = sum(transfer.num_bytes - transfer.unmoved for transfer in batch)
        if self.timeline is None or not num_bytes:
            return
        ran_s = None if first.copied is None else first.copied.ran_s
        # Threads time their copies. A GPU's copy is logged from submission until now, an upper
        # bound.
        start, end = ran_s or (first.submitted_s, time.perf_counter())
        if self.wire.emulated_bandwidth is not None:
            start, end = first.begins_s, max(end, batch[-1].ends_s)
        kind, track = first.kind, str(first.direction)
        self.timeline.add(kind, track, start, end, bytes=num_bytes, kind=kind)


def _stream_transfers(transfers: Iterable[Transfer]) -> list[StreamTransfer]:
    return [transfer for transfer in transfers if isinstance(transfer, StreamTransfer)]


def _link_error(transfer: Transfer, error: RuntimeError) -> LinkError:
    what, place = "weights" if transfer.kind == "weights" else "KV", _PLACES[transfer.direction]
    return LinkError(f"copying {what} to the {place} failed: {error}. Run the search again.")
