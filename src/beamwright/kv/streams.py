"""Copy streams: asynchronous copies between device and host memory that overlap with compute.

`CudaStreams` uses one CUDA side stream per direction. `HostStreams` has one copier thread per
direction, for CPUs, where both tiers are RAM. On a CPU, compute ends before its call returns. So a
copy may start at once, and a reader waits for the copy. Tests of the order of copies and compute
use a fake in place of `CudaStreams`.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from beamwright.errors import error_line
from beamwright.protocols import Direction

_LOCKED_BYTES = 2**26  # bytes that are page-locked at a time


def send_to_device(values: Any, device: torch.device) -> torch.Tensor:
    """Copy numbers (an array or lists) to a device as a tensor, without synchronising the GPU."""
    made = torch.as_tensor(values)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class FileBytes:
    """The source of a copy by `HostStreams`: a range of an open file, and its checksum."""

    handle: int
    start: int
    num_bytes: int
    checksum: int

    @classmethod
    def write(cls, handle: int, start: int, values: NDArray[np.uint8]) -> FileBytes:
        """Write bytes at `start` to the file of `handle`, and return where they are.

        Raises:
            OSError: if the disk is full or fails.
        """
        at = 0
        while at < values.nbytes:
            at += os.pwrite(handle, values.data[at:], start + at)
        return cls(handle, start, values.nbytes, _checksum(values))

    def read_into(self, values: NDArray[np.uint8]) -> None:
        """Read the range into an array [num_bytes].

        Raises:
            OSError: if the file cannot be read. RuntimeError: if its bytes have changed.
        """
        view, at = values.data, 0
        while at < self.num_bytes and (
            count := os.preadv(self.handle, [view[at:]], self.start + at)
        ):
            at += count
        if at < self.num_bytes or _checksum(values) != self.checksum:
            raise RuntimeError("the temporary file has changed since it was written")


def _checksum(values: NDArray[np.uint8]) -> int:
    """Return the sum of all 64-bit words, which takes much less time than reading a disk."""
    whole = len(values) // 8 * 8
    words = values[:whole].view(np.uint64).sum(dtype=np.uint64)
    return int(words) + int(values[whole:].sum(dtype=np.uint64))


class Piece(NamedTuple):
    """One copy to make, between two arrays of equal shape.

    destination, source: arrays or `Blocks`; None in the simulator. A source may be `FileBytes`.
    """

    destination: Any
    source: Any
    num_bytes: int


@dataclass(eq=False)
class BlockMemory:
    """Memory of a pool as blocks [block, bytes], on a GPU or page-locked on the host.

    lock_blocks: number of blocks that are page-locked at a time. No copy may cross a multiple of
        this number.
    locked: True if all blocks in use are page-locked, so that a kernel can read them.
    """

    by_block: torch.Tensor
    lock_blocks: int
    locked: bool = True


class LockedBlocks:
    """Zeroed host memory in blocks that is page-locked (pinned) piece by piece as it is used.

    Locking all of it at once would commit all pages. A piece ends where both a block and a page
    end. So each page is locked once, and no copy may reach from one piece into the next. If locking
    the first piece fails, all memory is allocated with `pin_memory=True`. That is not the first
    choice, because that allocator rounds up to a power of two and keeps freed memory. If a later
    piece cannot be locked, it stays pageable: copies are correct, but slower.

    memory: the blocks, in these pieces.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        size, page = num_blocks * block_bytes, mmap.PAGESIZE
        whole = page // math.gcd(page, block_bytes)
        lock_blocks = whole * max(1, _LOCKED_BYTES // (whole * block_bytes))
        self._owner = np.zeros(size + page, dtype=np.uint8)
        start = -self._owner.ctypes.data % page
        flat = torch.from_numpy(self._owner[start : start + size])
        self.memory = BlockMemory(flat.view(-1, block_bytes), lock_blocks)
        self._num_locked = 0
        self.lock(1)
        if not self.memory.locked:
            flat = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self._owner, self._num_locked = flat.numpy(), num_blocks
            self.memory = BlockMemory(flat.view(-1, block_bytes), lock_blocks)

    def lock(self, num_blocks: int) -> None:
        """Page-lock memory up to block number `num_blocks`, before these blocks are used."""
        while self._num_locked < num_blocks and self.memory.locked:
            end = self._num_locked + self.memory.lock_blocks
            piece = self.memory.by_block[self._num_locked : end]
            cudart, address = torch.cuda.cudart(), piece.data_ptr()
            if int(cudart.cudaHostRegister(address, piece.nbytes, 0)):
                self.memory.locked = False
                with suppress(RuntimeError):
                    _ = torch.ones(1, device="cuda") + 1  # clears the error for the next launch
                return
            weakref.finalize(self._owner, cudart.cudaHostUnregister, address)
            self._num_locked = end


class Blocks(NamedTuple):
    """Source or destination of a copy of many blocks, given by their numbers."""

    memory: BlockMemory
    numbers: tuple[int, ...]


class CopyHandle(Protocol):
    """Handle of queued copies, with the methods of a CUDA event.

    ran_s: when the copies began and ended by `time.perf_counter`; None if this is not known (yet).
    """

    ran_s: tuple[float, float] | None

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def cancel(self) -> int:
        """Cancel copies that have not begun, wait for the rest, and return the bytes cancelled."""


# Function that returns how many seconds compute waited for copies; None while not known.
ComputeDelay = Callable[[], float | None]


class Streams(Protocol):
    """Interface to one copy stream per direction, ordered with the compute stream.

    strided: True if pieces need not be contiguous.
    batches: True if transfers that are queued together are best copied as one batch. False: they
        are queued one by one, and each can be cancelled.
    """

    strided: bool
    batches: bool

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> CopyHandle:
        """Queue copies on a direction's stream, after all compute that is queued so far."""

    def delay_compute(self, copied: CopyHandle) -> ComputeDelay:
        """Make compute that is queued from now on start after these copies.

        The host does not wait, unless compute runs on the host.
        """

    def close(self) -> None:
        """Cancel the copies that have not begun. The streams can be used again."""


# From this many copies on, one kernel makes them all, if their mean size is below this number of
# bytes. Larger copies are queued one by one, so that they take no multiprocessors from compute.
_MANY, _LARGE_BYTES = 16, 2**20
_UNIT_BYTES = 16  # bytes that a thread of the kernel loads at once


class CudaStreams:
    """`Streams` of a CUDA device. Pieces are `Blocks` or contiguous tensors, pinned on the host."""

    strided = False
    batches = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {direction: torch.cuda.Stream(device) for direction in Direction}

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> CopyHandle:
        stream = self._side[direction]
        stream.wait_event(_event(torch.cuda.current_stream(self._device)))
        with torch.cuda.stream(stream):
            for piece in self._one_by_one(pieces):
                # A strided copy would go through unpinned memory, and the host would wait for it.
                assert piece.destination.is_contiguous()
                assert piece.source.is_contiguous()
                piece.destination.copy_(piece.source, non_blocking=True)
        return _CudaCopied(_event(stream))

    def _one_by_one(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Copy lists of small blocks by a kernel, and yield the other pieces to copy one by one."""
        listed: dict[tuple[BlockMemory, BlockMemory], tuple[list[int], list[int]]] = {}
        for piece in pieces:
            to, source = piece.destination, piece.source
            if isinstance(to, Blocks):
                ends, starts = listed.setdefault((to.memory, source.memory), ([], []))
                ends.extend(to.numbers)
                starts.extend(source.numbers)
            else:
                yield piece
        for (there, here), lists in listed.items():
            numbers, block_bytes = np.array(lists, np.int32), there.by_block.shape[1]
            runs = _runs(numbers, there.lock_blocks, here.lock_blocks)
            small = len(runs) >= _MANY and numbers.shape[1] * block_bytes < len(runs) * _LARGE_BYTES
            if small and self._copy_by_kernel(there, here, numbers):
                continue
            for to, source, count in runs:
                sides = there.by_block[to : to + count], here.by_block[source : source + count]
                yield Piece(*sides, count * block_bytes)

    def _copy_by_kernel(
        self, there: BlockMemory, here: BlockMemory, numbers: NDArray[np.int32]
    ) -> bool:
        """Copy blocks by number in one launch; return False, without copying, if impossible."""
        whole = there.by_block.shape[1] % _UNIT_BYTES == 0
        if not (whole and there.locked and here.locked) or self._copy_listed is None:
            return False
        try:
            self._copy_listed(there.by_block, here.by_block, numbers)
        except Exception:  # without a working compiler, copies one by one give the same result
            self._copy_listed = None
            return False
        return True

    @cached_property
    def _copy_listed(self) -> Callable[..., None] | None:
        """`copy_kernel.copy_numbered_blocks`, imported at first use; None if it cannot run here."""
        if find_spec("triton") is None:
            return None
        from beamwright.kv.copy_kernel import copy_numbered_blocks, sees_host_memory  # noqa: PLC0415

        return copy_numbered_blocks if sees_host_memory(self._device) else None

    def delay_compute(self, copied: CopyHandle) -> ComputeDelay:
        assert isinstance(copied, _CudaCopied)
        compute, arrived = torch.cuda.current_stream(self._device), copied.end
        ready = _event(compute)
        compute.wait_event(arrived)

        def seconds() -> float | None:
            """Return the seconds by which compute was delayed; None while that is not known."""
            if not (ready.query() and arrived.query()):
                return None
            return max(0.0, float(ready.elapsed_time(arrived)) / 1e3)

        return seconds

    def close(self) -> None:
        """Do nothing: copies queued on a GPU cannot be cancelled."""


def _runs(numbers: NDArray[np.int32], *unit_blocks: int) -> list[tuple[int, int, int]]:
    """Divide blocks into runs that one copy can move: (destination, source, number of blocks).

    numbers: [2, count], the block numbers of destinations, then of sources.
    unit_blocks: for destinations and sources, how many blocks are page-locked at a time. No run
        crosses a multiple of this.
    """
    parts = numbers // np.array(unit_blocks)[:, None]
    breaks = ((np.diff(numbers) != 1) | (np.diff(parts) != 0)).any(axis=0)
    starts = np.flatnonzero(np.append(True, breaks))
    counts = np.diff(starts, append=numbers.shape[1])
    return list(zip(*numbers[:, starts].tolist(), counts.tolist(), strict=True))


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event after all work that the stream has queued so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class _CudaCopied:
    # Not known: CUDA event times cannot be compared with `time.perf_counter`.
    ran_s: tuple[float, float] | None = None

    def __init__(self, end: torch.cuda.Event) -> None:
        self.end, self._over = end, False

    def query(self) -> bool:
        # The result is cached, because each transfer of a batch calls this.
        self._over = self._over or bool(self.end.query())
        return self._over

    def synchronize(self) -> None:
        self.end.synchronize()

    def cancel(self) -> int:
        self.end.synchronize()
        return 0


class HostStreams:
    """`Streams` of a CPU. Pieces are CPU tensors or arrays. Threads start at the first copy."""

    strided = True
    batches = False

    def __init__(self) -> None:
        self._failed: dict[Direction, BaseException] = {}
        self._threads = {d: ThreadPoolExecutor(1, f"copier-{d}") for d in Direction}

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> CopyHandle:
        """Queue the copies for the direction's thread.

        Raises:
            RuntimeError: if an earlier copy in this direction has failed, until `close` is called.
        """
        if direction in self._failed:
            error = self._failed[direction]
            raise RuntimeError(error_line(error)) from error
        copies = _HostCopies(pieces)
        copies.done = self._threads[direction].submit(self._run, direction, copies)
        return copies

    def delay_compute(self, copied: CopyHandle) -> ComputeDelay:
        """Block the host until the copies have ended, because compute runs on the host."""
        start = time.perf_counter()
        copied.synchronize()
        waited_s = time.perf_counter() - start
        return lambda: waited_s

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        HostStreams.__init__(self)

    def _run(self, direction: Direction, copies: _HostCopies) -> None:
        """Run the copies. After a failure, all copies queued in this direction fail too."""
        try:
            if direction in self._failed:
                raise self._failed[direction]
            copies.run()
        except BaseException as error:
            self._failed[direction] = error
            raise


class _HostCopies:
    """Copies for a copier thread, which the host may cancel before they begin."""

    done: Future[None]

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.ran_s: tuple[float, float] | None = None

    def run(self) -> None:
        start = time.perf_counter()
        for piece in self._pieces:
            if isinstance(piece.source, FileBytes):
                piece.source.read_into(_as_array(piece.destination))
            else:
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
            raise RuntimeError(error_line(error)) from error

    def cancel(self) -> int:
        if self.done.cancel():
            return sum(piece.num_bytes for piece in self._pieces)
        self.done.exception()  # waits until the copies have ended
        return 0


def _as_array(memory: Any) -> np.ndarray[Any, Any]:
    """Return CPU memory as an array without copying; bfloat16 becomes 16-bit integers."""
    if isinstance(memory, np.ndarray):
        return memory
    plain = memory.detach()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    array: np.ndarray[Any, Any] = plain.numpy()
    return array
