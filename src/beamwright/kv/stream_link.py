"""StreamLink: copies on a side stream per direction, ordered after what compute has queued.

Knows streams only by `streams.Streams`: those of a card, or threads beside a CPU's compute. Three
races corrupt KV where the order is missing: a store that runs before the compute that writes its
block, a load into a block that earlier compute still reads, and compute that reads a block before
its load. Every copy therefore starts after all that compute had queued when it was submitted;
whoever needs its result waits for it on the host (`wait`) or holds compute back (`order`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from beamwright.errors import LinkError
from beamwright.kv.link import Piece, SpanSink, Transfer, TransferState
from beamwright.kv.streams import Copied, HeldBack, Streams, merged
from beamwright.kv.wire import Wire
from beamwright.protocols import Direction


@dataclass
class Arrival:
    """When a transfer is done: its marker, and no earlier than an emulated link allows.

    marker: None as long as its batch is not queued. begins_s, ends_s: when an emulated link moves
    it. unmoved: bytes that were taken back.
    """

    marker: Copied | None = None
    begins_s: float = 0.0
    ends_s: float = 0.0
    unmoved: int = 0
    settled: bool = False
    error: RuntimeError | None = None

    def is_set(self) -> bool:
        """True once the bytes are there, or never will be."""
        if not self.settled:
            try:
                arrived = self.marker is not None and self.marker.query()
                self.settled = arrived and time.perf_counter() >= self.ends_s
            except RuntimeError as error:
                self.fail(error)
        return self.settled

    def set(self) -> None:
        """It will never matter."""
        self.settled = True

    def fail(self, error: RuntimeError) -> None:
        """It will never arrive."""
        self.settled, self.error = True, error

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host until the bytes are there."""
        del timeout
        if self.settled:
            return True
        assert self.marker is not None, "a transfer is waited for before it is queued"
        try:
            self.marker.synchronize()
        except RuntimeError as error:
            self.fail(error)
            return True
        left = self.ends_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self.settled = True
        return True

    def recall(self, num_bytes: int) -> None:
        """Take back what has not moved, of so many bytes; an emulated link has moved nothing
        before it begins."""
        assert self.marker is not None
        try:
            self.unmoved = self.marker.recall()
        except RuntimeError as error:
            self.fail(error)
        if time.perf_counter() < self.begins_s:
            self.unmoved = num_bytes
        self.settled = True


class StreamLink:
    """A `Link` over `Streams`. Bytes are counted when submitted, less what is cancelled in time.

    One thread at a time may call it. Two that compute at once have a link each, over one `wire`,
    and `bytes_moved` is of both.

    held_back_s: seconds in which compute waited for what `order` made it wait for, as far as
        the device has reported.
    """

    def __init__(
        self,
        streams: Streams,
        emulated_bandwidth: int | None = None,
        timeline: SpanSink | None = None,
        *,
        wire: Wire | None = None,
    ) -> None:
        self.strided = streams.strided
        self.wire = wire or Wire(emulated_bandwidth)
        self.emulated_bandwidth = self.wire.emulated_bandwidth
        self.bytes_moved = self.wire.bytes_moved
        self.busy_s: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.held_back_s = 0.0
        self.timeline = timeline
        self._streams = streams
        self._underway: list[tuple[Transfer, Arrival, float]] = []
        self._held: list[HeldBack] = []
        self._reported_s = 0.0
        self._gathering = 0
        self._gathered: list[tuple[Transfer, Arrival]] = []

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        arrival = Arrival()
        transfer = Transfer(direction, kind, pieces, num_bytes, TransferState.QUEUED, arrival)
        self._gathered.append((transfer, arrival))
        if not (self._gathering and self._streams.batches):
            self._queue()
        return transfer

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is submitted inside is queued at the end, one batch per direction.

        Its copies are merged across transfers. Whoever waits for one of them ends the batch.
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
        pending = list(transfers)
        for transfer in pending:
            transfer.moved.wait()
        self._note_finished()
        self._check(pending)
        return time.perf_counter() - start

    def order(self, transfers: Iterable[Transfer]) -> float:
        """The host goes on, unless compute is the host, or an emulated link's time has
        to pass.

        Gives the seconds of orders that the device has reported since the last one.
        """
        pending = list(transfers)
        if self.emulated_bandwidth is not None:
            return self.wait(pending) if pending else 0.0
        self._queue()
        latest = {transfer.direction: transfer for transfer in pending if not transfer.finished}
        for transfer in latest.values():  # a direction keeps its order
            arrival = _arrival(transfer)
            assert arrival.marker is not None
            try:
                self._held.append(self._streams.hold_back(arrival.marker))
            except RuntimeError as error:
                arrival.fail(error)
        self._note_finished()
        self._check(pending)
        newly_known_s, self._reported_s = self.held_back_s - self._reported_s, self.held_back_s
        return newly_known_s

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """What streams cannot take back moves first: then its blocks are free."""
        self._queue()
        for transfer in transfers:
            if not transfer.finished:
                self._recall(transfer, _arrival(transfer))
                transfer.state = TransferState.CANCELLED
        self._note_finished()

    def close(self) -> None:
        self._queue()
        self._streams.close()
        for transfer, arrival, _ in self._underway:
            if transfer.state is not TransferState.CANCELLED:
                self._recall(transfer, arrival)  # which says what the streams have forgotten
                if arrival.unmoved:
                    transfer.state = TransferState.CANCELLED
        self._note_finished()

    # --- inside ------------------------------------------------------------------------------

    def _queue(self) -> None:
        """Hand what was gathered to the streams, each direction's copies as one batch."""
        gathered, self._gathered = self._gathered, []
        for direction in dict.fromkeys(transfer.direction for transfer, _ in gathered):
            batch = [each for each in gathered if each[0].direction is direction]
            pieces = [piece for transfer, _ in batch for piece in transfer.pieces]
            if self._streams.batches:
                pieces = merged(pieces)
            try:
                marker = self._streams.copy(direction, pieces, self._streams.mark())
            except RuntimeError as error:
                for transfer, arrival in gathered:
                    if arrival.marker is None:
                        transfer.state = TransferState.CANCELLED
                        arrival.set()
                raise LinkError(f"the {direction} link failed: {error}") from error
            self._started(batch, marker)

    def _started(self, batch: Sequence[tuple[Transfer, Arrival]], marker: Copied) -> None:
        now = time.perf_counter()
        for transfer, arrival in batch:
            direction, arrival.marker = transfer.direction, marker
            taken = self.wire.take(direction, transfer.num_bytes, now)
            arrival.begins_s, arrival.ends_s = taken
            transfer.state = TransferState.RUNNING
            self._underway.append((transfer, arrival, now))

    def _check(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            cause = _arrival(transfer).error
            if cause is not None:
                raise LinkError(f"the {transfer.direction} link failed: {cause}") from cause

    def _recall(self, transfer: Transfer, arrival: Arrival) -> None:
        arrival.recall(transfer.num_bytes)
        left = arrival.ends_s - max(time.perf_counter(), arrival.begins_s)
        self.wire.give_back(transfer.direction, arrival.unmoved, max(0.0, left))

    def _note_finished(self) -> None:
        """Take down what has ended since the last look."""
        batches: dict[int, list[tuple[Transfer, Arrival, float]]] = {}
        for each in self._underway:
            batches.setdefault(id(each[1].marker), []).append(each)
        self._underway = []
        for batch in batches.values():
            if all(arrival.is_set() for _, arrival, _ in batch):
                self._note_batch(batch)
            else:
                self._underway += batch
        waiting = [(held, held.seconds()) for held in self._held]
        self.held_back_s += sum(seconds for _, seconds in waiting if seconds is not None)
        self._held = [held for held, seconds in waiting if seconds is None]

    def _note_batch(self, batch: Sequence[tuple[Transfer, Arrival, float]]) -> None:
        """Transfers of one batch ran as one: the span is that of all, with the bytes of all."""
        for transfer, arrival, _ in batch:
            if transfer.state is TransferState.RUNNING:
                failed = arrival.error is not None
                transfer.state = TransferState.CANCELLED if failed else TransferState.DONE
        transfer, arrival, submitted = batch[0]
        num_bytes = sum(each.num_bytes - one.unmoved for each, one, _ in batch)
        if not num_bytes:
            return
        start, end = _span_s(arrival) or (submitted, time.perf_counter())
        if self.emulated_bandwidth is not None:
            start, end = arrival.begins_s, max(end, batch[-1][1].ends_s)
        self.busy_s[transfer.direction] += end - start
        if self.timeline is not None:
            self.timeline.add(
                transfer.kind,
                str(transfer.direction),
                start,
                end,
                bytes=num_bytes,
                kind=transfer.kind,
            )


def _arrival(transfer: Transfer) -> Arrival:
    assert isinstance(transfer.moved, Arrival), "the transfer is another link's"
    return transfer.moved


def _span_s(arrival: Arrival) -> tuple[float, float] | None:
    """As the device timed it; else, from submission to this look is an upper bound."""
    if arrival.marker is None or arrival.error is not None:
        return None
    try:
        return arrival.marker.ran_s()
    except RuntimeError:
        return None
