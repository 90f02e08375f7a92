"""`Streams` of a card, and of a CPU: what copies beside compute. Knows queues, no KV.

`CudaStreams` is the only place that touches a card; whoever tests what is ordered after what puts
a stand-in in its place. `HostStreams` is a copier thread per direction, where both tiers are RAM:
compute runs as the host calls it, so a copy may start at once, and who needs its result waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from beamwright.protocols import Direction


@dataclass(frozen=True)
class Piece:
    """One contiguous (or strided) copy of equal-shaped arrays; None where nothing is stored."""

    destination: Any
    source: Any
    num_bytes: int


class Copied(Protocol):
    """The end of queued copies.

    ran_s: when they began and ended by `time.perf_counter`, once they have; None if not known.
    """

    ran_s: tuple[float, float] | None

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def recall(self) -> int:
        """Take back what can be, and return when nothing moves; gives the bytes taken back."""


HeldBack = Callable[[], float | None]
"""How many seconds compute waited for copies; None as long as that is not known."""


class Streams(Protocol):
    """The compute stream, and one side stream per direction.

    strided: pieces need not be contiguous. batches: what is queued together is best copied as one;
        else transfers are queued one by one, each of which can be taken back.
    """

    strided: bool
    batches: bool

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> Copied:
        """Queue copies on a direction's stream, behind all that compute has queued so far."""

    def hold_back(self, copied: Copied) -> HeldBack:
        """What compute queues from here on starts after those copies.

        A host that is not compute itself does not wait.
        """

    def close(self) -> None:
        """Forget what can be taken back; the streams can be used again."""


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Fewer pieces that move the same bytes: neighbours on both sides become one.

    Only one-dimensional contiguous tensors of bytes are joined, which is what blocks are.
    """
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is None or not (
            _follows(last.destination, piece.destination) and _follows(last.source, piece.source)
        ):
            joined.append(piece)
            continue
        size = last.destination.numel() + piece.destination.numel()
        to, source = (
            side.as_strided((size,), (1,), side.storage_offset())
            for side in (last.destination, last.source)
        )
        joined[-1] = Piece(to, source, last.num_bytes + piece.num_bytes)
    return joined


def _follows(left: object, right: object) -> bool:
    for side in (left, right):
        if not isinstance(side, torch.Tensor) or side.dtype != torch.uint8:
            return False
        if side.dim() != 1 or not side.is_contiguous():
            return False
    assert isinstance(left, torch.Tensor)
    assert isinstance(right, torch.Tensor)
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and left.storage_offset() + left.numel() == right.storage_offset()


class CudaStreams:
    """`Streams` of one CUDA device; pieces are contiguous tensors, the host's pinned."""

    strided = False
    batches = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {direction: torch.cuda.Stream(device) for direction in Direction}

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> Copied:
        stream = self._side[direction]
        stream.wait_event(_event(torch.cuda.current_stream(self._device)))
        with torch.cuda.stream(stream):
            for piece in pieces:
                # Anything else would go through unpinned memory, and the host would wait.
                assert piece.destination.is_contiguous()
                assert piece.source.is_contiguous()
                piece.destination.copy_(piece.source, non_blocking=True)
        return _CudaCopied(_event(stream))

    def hold_back(self, copied: Copied) -> HeldBack:
        assert isinstance(copied, _CudaCopied)
        compute, arrived = torch.cuda.current_stream(self._device), copied.end
        ready = _event(compute)
        compute.wait_event(arrived)

        def seconds() -> float | None:
            """From the moment at which compute could have gone on to the copies' end."""
            if not (ready.query() and arrived.query()):
                return None
            return max(0.0, float(ready.elapsed_time(arrived)) / 1e3)

        return seconds

    def close(self) -> None:
        """What a card was asked to copy it copies."""


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of what the stream has queued so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class _CudaCopied:
    ran_s: tuple[float, float] | None = None  # the card has a clock of its own

    def __init__(self, end: torch.cuda.Event) -> None:
        self.end = end

    def query(self) -> bool:
        return bool(self.end.query())

    def synchronize(self) -> None:
        self.end.synchronize()

    def recall(self) -> int:
        self.end.synchronize()
        return 0


class HostStreams:
    """`Streams` of a CPU: pieces are its tensors or arrays. The threads start with use."""

    strided = True
    batches = False

    def __init__(self) -> None:
        self._failed: dict[Direction, BaseException] = {}
        self._threads = {d: ThreadPoolExecutor(1, f"copier-{d}") for d in Direction}

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> Copied:
        """Queue the copies for the direction's thread.

        Raises:
            RuntimeError: if one has failed on it, until `close`.
        """
        if direction in self._failed:
            raise RuntimeError(repr(self._failed[direction])) from self._failed[direction]
        copies = _HostCopies(pieces)
        copies.done = self._threads[direction].submit(self._run, direction, copies)
        return copies

    def hold_back(self, copied: Copied) -> HeldBack:
        """Compute is the host, so the host waits."""
        start = time.perf_counter()
        copied.synchronize()
        waited_s = time.perf_counter() - start
        return lambda: waited_s

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        HostStreams.__init__(self)

    def _run(self, direction: Direction, copies: _HostCopies) -> None:
        """What is queued behind copies that fail fails with them."""
        try:
            if direction in self._failed:
                raise self._failed[direction]
            copies.run()
        except BaseException as error:
            self._failed[direction] = error
            raise


class _HostCopies:
    """Pieces that one thread copies; another may take them back before it begins."""

    done: Future[None]

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.ran_s: tuple[float, float] | None = None

    def run(self) -> None:
        start = time.perf_counter()
        for piece in self._pieces:
            np.copyto(_as_array(piece.destination), _as_array(piece.source))
        self.ran_s = start, time.perf_counter()

    def query(self) -> bool:
        if not self.done.done():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        error = None if self.done.cancelled() else self.done.exception()
        if error is not None:
            raise RuntimeError(repr(error)) from error

    def recall(self) -> int:
        if self.done.cancel():
            return sum(piece.num_bytes for piece in self._pieces)
        self.done.exception()  # waits
        return 0


def _as_array(memory: Any) -> np.ndarray[Any, Any]:
    """The same CPU memory as an array; bfloat16 goes as 16-bit integers."""
    if isinstance(memory, np.ndarray):
        return memory
    plain = memory.detach()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    array: np.ndarray[Any, Any] = plain.numpy()
    return array
