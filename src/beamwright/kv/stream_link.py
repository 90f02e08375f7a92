"""The link on a GPU: copies on two side streams, ordered after what the compute stream has queued.

Knows streams only by `streams.Streams`, so that its order of events is tested without a GPU. Three
races corrupt KV where the order is missing: a store that runs before the compute that writes its
block, a load into a block that earlier compute still reads, and compute that reads a block before
its load. Every copy therefore starts after all that compute had queued when it was submitted;
whoever needs its result waits for it on the host (`wait`) or holds compute back (`order`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from beamwright.errors import LinkError
from beamwright.kv.link import Direction, Piece, SpanSink, Transfer, TransferState
from beamwright.kv.streams import Copied, HeldBack, Streams, merged


@dataclass
class Arrival:
    """When a transfer is done: its marker, and no earlier than an emulated link allows.

    marker: None as long as its batch is not queued.
    """

    marker: Copied | None = None
    not_before_s: float = 0.0
    settled: bool = False
    error: RuntimeError | None = None

    def is_set(self) -> bool:
        """True once the bytes are there, or never will be."""
        if not self.settled:
            try:
                arrived = self.marker is not None and self.marker.query()
                self.settled = arrived and time.perf_counter() >= self.not_before_s
            except RuntimeError as error:
                self.settled, self.error = True, error
        return self.settled

    def set(self) -> None:
        """It will never matter."""
        self.settled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host until the bytes are there."""
        del timeout
        if self.settled:
            return True
        assert self.marker is not None, "a transfer is waited for before it is queued"
        try:
            self.marker.synchronize()
        except RuntimeError as error:
            self.settled, self.error = True, error
            return True
        left = self.not_before_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self.settled = True
        return True


class StreamLink:
    """See `kv.Link`. Bytes are counted when they are submitted: a queued copy cannot be recalled.

    held_back_s: seconds in which compute stood still for what `order` made it wait for, as far as
        the device has told.
    """

    def __init__(
        self,
        streams: Streams,
        emulated_bandwidth: int | None = None,
        timeline: SpanSink | None = None,
    ) -> None:
        self.strided = False
        self.emulated_bandwidth = emulated_bandwidth
        self.bytes_moved: Counter[Direction] = Counter()
        self.busy_s: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.held_back_s = 0.0
        self.timeline = timeline
        self._streams = streams
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._underway: list[tuple[Transfer, float]] = []
        self._held: list[HeldBack] = []
        self._told_s = 0.0
        self._gathering = 0
        self._gathered: list[Transfer] = []

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        """See `Link`."""
        num_bytes = sum(piece.num_bytes for piece in pieces)
        arrival = Arrival()
        transfer = Transfer(direction, kind, pieces, num_bytes, TransferState.QUEUED, arrival)
        self._gathered.append(transfer)
        if not self._gathering:
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
        """See `Link`."""
        start = time.perf_counter()
        self._queue()
        for transfer in transfers:
            self._settle(transfer)
            self._check(transfer)
        self._note_finished()
        return time.perf_counter() - start

    def order(self, transfers: Iterable[Transfer]) -> float:
        """See `Link`. The host goes on, unless an emulated link's time has to pass.

        Gives the seconds of earlier orders that the device has told of since the last one.
        """
        pending = list(transfers)
        if self.emulated_bandwidth is not None:
            return self.wait(pending)
        self._queue()
        self._note_finished()
        latest = {transfer.direction: transfer for transfer in pending if not transfer.finished}
        for transfer in latest.values():  # a direction keeps its order
            assert isinstance(transfer.moved, Arrival)
            assert transfer.moved.marker is not None
            self._held.append(self._streams.hold_back(transfer.moved.marker))
        for transfer in pending:
            self._check(transfer)
        told, self._told_s = self.held_back_s - self._told_s, self.held_back_s
        return told

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """See `Link`. What is queued will move: its blocks are free once it has."""
        self._queue()
        for transfer in transfers:
            self._settle(transfer)
            transfer.state = TransferState.CANCELLED
        self._note_finished()

    def close(self) -> None:
        """See `Link`."""
        self._queue()
        for transfer, _ in self._underway:
            self._settle(transfer)
        self._note_finished()

    # --- inside ------------------------------------------------------------------------------

    def _queue(self) -> None:
        """Hand what was gathered to the streams, each direction's copies as one batch."""
        gathered, self._gathered = self._gathered, []
        for direction in dict.fromkeys(transfer.direction for transfer in gathered):
            batch = [transfer for transfer in gathered if transfer.direction is direction]
            pieces = merged([piece for transfer in batch for piece in transfer.pieces])
            try:
                marker = self._streams.copy(direction, pieces, self._streams.mark())
            except RuntimeError as error:
                for transfer in gathered:
                    transfer.state = TransferState.CANCELLED
                    transfer.moved.set()
                raise LinkError(f"the {direction} stream failed: {error}") from error
            self._started(batch, marker)

    def _started(self, batch: Sequence[Transfer], marker: Copied) -> None:
        for transfer in batch:
            assert isinstance(transfer.moved, Arrival)
            transfer.moved.marker = marker
            transfer.moved.not_before_s = self._emulated_end_s(
                transfer.direction, transfer.num_bytes
            )
            transfer.state = TransferState.RUNNING
            self.bytes_moved[transfer.direction] += transfer.num_bytes
            self._underway.append((transfer, time.perf_counter()))

    def _check(self, transfer: Transfer) -> None:
        if isinstance(transfer.moved, Arrival) and transfer.moved.error is not None:
            cause = transfer.moved.error
            raise LinkError(f"the {transfer.direction} stream failed: {cause}") from cause

    def _settle(self, transfer: Transfer) -> None:
        transfer.moved.wait()
        if transfer.state is TransferState.RUNNING:
            transfer.state = TransferState.DONE

    def _emulated_end_s(self, direction: Direction, num_bytes: int) -> float:
        if self.emulated_bandwidth is None:
            return 0.0
        begun = max(time.perf_counter(), self._free_at_s[direction])
        self._free_at_s[direction] = begun + num_bytes / self.emulated_bandwidth
        return self._free_at_s[direction]

    def _note_finished(self) -> None:
        """Spans as the device timed them; else from submission to this look: an upper bound.

        Transfers of one batch ran as one: the span is that of all, with the bytes of all.
        """
        now = time.perf_counter()
        batches: dict[int, list[tuple[Transfer, float]]] = {}
        for transfer, start in self._underway:
            assert isinstance(transfer.moved, Arrival)
            batches.setdefault(id(transfer.moved.marker), []).append((transfer, start))
        self._underway = []
        for batch in batches.values():
            if all(transfer.finished for transfer, _ in batch):
                self._note_batch(batch, now)
            else:
                self._underway += batch
        waiting = [(held, held.seconds()) for held in self._held]
        self.held_back_s += sum(seconds for _, seconds in waiting if seconds is not None)
        self._held = [held for held, seconds in waiting if seconds is None]

    def _note_batch(self, batch: Sequence[tuple[Transfer, float]], now: float) -> None:
        transfer, submitted = batch[0]
        start, end = self._span_s(transfer) or (submitted, now)
        if self.emulated_bandwidth is not None:
            start, end = submitted, now
        self.busy_s[transfer.direction] += end - start
        num_bytes = sum(each.num_bytes for each, _ in batch)
        if self.timeline is not None and num_bytes:
            self.timeline.add(
                transfer.kind,
                str(transfer.direction),
                start,
                end,
                bytes=num_bytes,
                kind=transfer.kind,
            )

    def _span_s(self, transfer: Transfer) -> tuple[float, float] | None:
        assert isinstance(transfer.moved, Arrival)
        marker = transfer.moved.marker
        if marker is None or transfer.moved.error is not None:
            return None
        try:
            return marker.ran_s()
        except RuntimeError:
            return None
