"""HostStreams: a copier thread per direction beside compute, where both tiers are RAM.

Compute runs as the host calls it, so a copy may start at once, and who needs its result waits.
LBS section 4.1 (write-back while decoding) and 4.2 (prefetch).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from beamwright.kv.link import Piece
from beamwright.kv.streams import Copied, HeldBack, Marker
from beamwright.protocols import Direction


class HostStreams:
    """`Streams` of a CPU: pieces are its tensors or arrays. The threads start with use."""

    strided = True
    batches = False

    def __init__(self) -> None:
        self._lanes = {direction: _Lane(f"copier-{direction}") for direction in Direction}

    def mark(self) -> Marker:
        """Compute has done all that it was asked to."""
        return _Now()

    def copy(self, direction: Direction, pieces: Sequence[Piece], after: Marker) -> Copied:
        """Queue the copies for the direction's thread.

        Raises:
            RuntimeError: if the direction's thread has failed, until `close`.
        """
        del after
        return self._lanes[direction].put(_HostCopies(pieces))

    def hold_back(self, copied: Copied) -> HeldBack:
        """Compute is the host, so the host waits."""
        start = time.perf_counter()
        copied.synchronize()
        return _Waited(time.perf_counter() - start)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


class _HostCopies:
    """Pieces that one thread copies, and another may take back."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._unmoved = sum(piece.num_bytes for piece in pieces)
        self._begun = self._recalled = False
        self._changing, self._over = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self._ran_s: tuple[float, float] | None = None

    def run(self) -> None:
        with self._changing:
            if self._recalled:
                return
            self._begun = True
        start = time.perf_counter()
        for piece in self._pieces:
            if self._recalled:
                break
            np.copyto(as_array(piece.destination), as_array(piece.source))
            self._unmoved -= piece.num_bytes
        self._ran_s = start, time.perf_counter()
        self._over.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    def query(self) -> bool:
        over = self._over.is_set()
        if over:
            self.synchronize()
        return over

    def synchronize(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise RuntimeError(repr(self._error)) from self._error

    def ran_s(self) -> tuple[float, float] | None:
        return self._ran_s

    def recall(self) -> int:
        with self._changing:
            self._recalled = True
            if not self._begun:
                self._over.set()
        self._over.wait()
        return self._unmoved


class _Lane:
    """One direction: a queue and the thread that empties it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_HostCopies | None] = SimpleQueue()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, copies: _HostCopies) -> _HostCopies:
        with self._changing:
            if self._error is not None:
                raise RuntimeError(repr(self._error)) from self._error
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(copies)
        return copies

    def close(self) -> None:
        """Forget what is queued, and wait for what is on its way."""
        for copies in self._taken():
            copies.recall()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._queue, self._thread, self._error = SimpleQueue(), None, None

    def _work(self) -> None:
        copies: _HostCopies | None = None
        try:
            while (copies := self._queue.get()) is not None:
                copies.run()
        except BaseException as error:  # whatever it is, waiting threads must hear of it
            with self._changing:
                self._error = error
                for each in [*([copies] if copies is not None else []), *self._taken()]:
                    each.fail(error)

    def _taken(self) -> list[_HostCopies]:
        """What is queued, which is not queued any more."""
        taken: list[_HostCopies] = []
        while True:
            try:
                copies = self._queue.get_nowait()
            except Empty:
                return taken
            if copies is not None:
                taken.append(copies)


class _Now:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Waited:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


def as_array(memory: Any) -> np.ndarray[Any, Any]:
    """The same CPU memory as an array; bfloat16 goes as 16-bit integers."""
    if isinstance(memory, np.ndarray):
        return memory
    plain = memory.detach()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    array: np.ndarray[Any, Any] = plain.numpy()
    return array
