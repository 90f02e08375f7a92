"""Streams: the compute stream of a device and a side stream per direction, as the link needs them.

Knows queues and their order, no KV. `CudaStreams` is the only place that touches a card; whoever
tests what is ordered after what puts a stand-in in its place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from beamwright.kv.link import Piece
from beamwright.protocols import Direction


class Marker(Protocol):
    """A point in a stream's queue."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Copied(Marker, Protocol):
    """The end of queued copies."""

    def ran_s(self) -> tuple[float, float] | None:
        """When they began and ended by `time.perf_counter`, once they have; None if not known."""
        ...

    def recall(self) -> int:
        """Take back what can be, and return when nothing moves; gives the bytes taken back."""
        ...


class HeldBack(Protocol):
    """Compute that waits for copies."""

    def seconds(self) -> float | None:
        """How long compute waited for them; None as long as that is not known."""
        ...


class Streams(Protocol):
    """The compute stream, and one side stream per direction.

    strided: pieces need not be contiguous. batches: what is queued together is best copied as one;
        else transfers are queued one by one, each of which can be taken back.
    """

    strided: bool
    batches: bool

    def mark(self) -> Marker:
        """After everything that compute has queued so far."""
        ...

    def copy(self, direction: Direction, pieces: Sequence[Piece], after: Marker) -> Copied:
        """Queue copies on a direction's stream, to start after `after`; marks their end."""
        ...

    def hold_back(self, copied: Copied) -> HeldBack:
        """What compute queues from here on starts after those copies.

        A host that is not compute itself does not wait.
        """
        ...

    def close(self) -> None:
        """Forget what can be taken back; the streams can be used again."""
        ...


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Fewer pieces that move the same bytes: neighbours on both sides become one.

    Only one-dimensional contiguous tensors of bytes are joined, which is what blocks are.
    """
    found: list[Piece] = []
    for piece in pieces:
        if found and _follows(found[-1].destination, piece.destination):
            last = found[-1]
            if _follows(last.source, piece.source):
                found[-1] = Piece(
                    _joined(last.destination, piece.destination),
                    _joined(last.source, piece.source),
                    last.num_bytes + piece.num_bytes,
                )
                continue
        found.append(piece)
    return found


def _follows(left: object, right: object) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    plain = all(
        side.dtype == torch.uint8 and side.dim() == 1 and side.is_contiguous()
        for side in (left, right)
    )
    return (
        plain
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.numel() == right.storage_offset()
    )


def _joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.as_strided((left.numel() + right.numel(),), (1,), left.storage_offset())


_ORIGIN_S = 60.0


class CudaStreams:
    """`Streams` of one CUDA device; pieces are contiguous tensors, the host's pinned.

    Events carry times, which an event that the host has seen ties to the host's clock: a new one
    every minute, as the time between two events is a float32 of milliseconds.
    """

    strided = False
    batches = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {direction: torch.cuda.Stream(device) for direction in Direction}
        self._clock = torch.cuda.Stream(device)  # always idle: its events pass at once
        self._origin = self._new_origin()

    def mark(self) -> Marker:
        marker: Marker = self._compute_event()
        return marker

    def copy(self, direction: Direction, pieces: Sequence[Piece], after: Marker) -> Copied:
        stream = self._side[direction]
        stream.wait_event(after)  # type: ignore[arg-type]
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        with torch.cuda.stream(stream):
            for piece in pieces:
                # Anything else would go through unpinned memory, and the host would wait.
                assert piece.destination.is_contiguous()
                assert piece.source.is_contiguous()
                piece.destination.copy_(piece.source, non_blocking=True)
        end = torch.cuda.Event(enable_timing=True)
        end.record(stream)
        if time.perf_counter() - self._origin[1] > _ORIGIN_S:
            self._origin = self._new_origin()
        return _CudaCopied(begin, end, *self._origin)

    def hold_back(self, copied: Copied) -> HeldBack:
        assert isinstance(copied, _CudaCopied)
        ready = self._compute_event()
        torch.cuda.current_stream(self._device).wait_event(copied.end)
        return _CudaHeldBack(ready, copied.end)

    def close(self) -> None:
        """What a card was asked to copy it copies."""

    def _new_origin(self) -> tuple[torch.cuda.Event, float]:
        """An event, and when it passed on the host's clock."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._clock)
        event.synchronize()
        return event, time.perf_counter()

    def _compute_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class _CudaCopied:
    def __init__(
        self, begin: torch.cuda.Event, end: torch.cuda.Event, origin: torch.cuda.Event, at_s: float
    ) -> None:
        self._begin, self.end, self._origin, self._at_s = begin, end, origin, at_s

    def query(self) -> bool:
        return bool(self.end.query())

    def synchronize(self) -> None:
        self.end.synchronize()

    def recall(self) -> int:
        self.end.synchronize()
        return 0

    def ran_s(self) -> tuple[float, float] | None:
        begin, end = (self._origin.elapsed_time(event) / 1e3 for event in (self._begin, self.end))
        return self._at_s + begin, self._at_s + max(begin, end)


class _CudaHeldBack:
    """From the moment at which compute could have gone on to the copies' end."""

    def __init__(self, ready: torch.cuda.Event, arrived: torch.cuda.Event) -> None:
        self._ready, self._arrived = ready, arrived

    def seconds(self) -> float | None:
        if not (self._ready.query() and self._arrived.query()):
            return None
        return max(0.0, float(self._ready.elapsed_time(self._arrived)) / 1e3)
