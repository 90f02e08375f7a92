"""The link on a GPU: copies on two side streams, ordered after what the compute stream has queued.

Knows streams only by `Streams`, so that its order of events is tested without a GPU. Two races
corrupt KV where the order is missing: a store that runs before the compute that writes its block,
and a load into a block that earlier compute still reads. Every copy therefore starts after all
that compute had queued when it was submitted; whoever needs its result waits for it on the host.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from beamwright.errors import LinkError
from beamwright.kv.link import Direction, Piece, SpanSink, Transfer, TransferState


class Marker(Protocol):
    """A point in a stream's queue."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """The compute stream, and one side stream per direction."""

    def mark(self) -> Marker:
        """After everything that compute has queued so far."""
        ...

    def copy(self, direction: Direction, pieces: Sequence[Piece], after: Marker) -> Marker:
        """Queue copies on a direction's stream, to start after `after`; marks their end."""
        ...


@dataclass
class Arrival:
    """When a transfer is done: its marker, and no earlier than an emulated link allows."""

    marker: Marker
    not_before_s: float = 0.0
    settled: bool = False
    error: RuntimeError | None = None

    def is_set(self) -> bool:
        """True once the bytes are there, or never will be."""
        if not self.settled:
            try:
                self.settled = self.marker.query() and time.perf_counter() >= self.not_before_s
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
    """See `kv.Link`. Bytes are counted when they are queued: a queued copy cannot be recalled."""

    def __init__(
        self,
        streams: Streams,
        emulated_bandwidth: int | None = None,
        timeline: SpanSink | None = None,
    ) -> None:
        self.emulated_bandwidth = emulated_bandwidth
        self.bytes_moved: Counter[Direction] = Counter()
        self.busy_s: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.timeline = timeline
        self._streams = streams
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._underway: list[tuple[Transfer, float]] = []

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        """See `Link`."""
        num_bytes = sum(piece.num_bytes for piece in pieces)
        try:
            marker = self._streams.copy(direction, pieces, self._streams.mark())
        except RuntimeError as error:
            raise LinkError(f"the {direction} stream failed: {error}") from error
        arrival = Arrival(marker, self._emulated_end_s(direction, num_bytes))
        transfer = Transfer(direction, kind, pieces, num_bytes, TransferState.RUNNING, arrival)
        self.bytes_moved[direction] += num_bytes
        self._underway.append((transfer, time.perf_counter()))
        return transfer

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """See `Link`."""
        start = time.perf_counter()
        for transfer in transfers:
            self._settle(transfer)
            if isinstance(transfer.moved, Arrival) and transfer.moved.error is not None:
                cause = transfer.moved.error
                raise LinkError(f"the {transfer.direction} stream failed: {cause}") from cause
        self._note_finished()
        return time.perf_counter() - start

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """See `Link`. What is queued will move: its blocks are free once it has."""
        for transfer in transfers:
            self._settle(transfer)
            transfer.state = TransferState.CANCELLED
        self._note_finished()

    def close(self) -> None:
        """See `Link`."""
        for transfer, _ in self._underway:
            self._settle(transfer)
        self._note_finished()

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
        """Seconds run from submission to the first look after the end: an upper bound."""
        now, pending = time.perf_counter(), []
        for transfer, start in self._underway:
            if not transfer.finished:
                pending.append((transfer, start))
                continue
            self.busy_s[transfer.direction] += now - start
            if self.timeline is not None and transfer.num_bytes:
                self.timeline.add(
                    transfer.kind,
                    str(transfer.direction),
                    start,
                    now,
                    bytes=transfer.num_bytes,
                    kind=transfer.kind,
                )
        self._underway = pending


class CudaStreams:
    """CUDA streams of one device; pieces are byte tensors, the host's pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {direction: torch.cuda.Stream(device) for direction in Direction}

    def mark(self) -> Marker:
        """See `Streams`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        marker: Marker = event
        return marker

    def copy(self, direction: Direction, pieces: Sequence[Piece], after: Marker) -> Marker:
        """See `Streams`."""
        stream = self._side[direction]
        stream.wait_event(after)  # type: ignore[arg-type]
        with torch.cuda.stream(stream):
            for piece in pieces:
                piece.destination.copy_(piece.source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        marker: Marker = event
        return marker
