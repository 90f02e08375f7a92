"""`Streams` of a card, and of a CPU: what copies beside compute. Knows queues, no KV.

`CudaStreams` is the only place that touches a card; whoever tests what is ordered after what puts
a stand-in in its place. `HostStreams` is a copier thread per direction, where both tiers are RAM:
compute runs as the host calls it, so a copy may start at once, and who needs its result waits.
"""

from __future__ import annotations

import math
import mmap
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

from beamwright.protocols import Direction

_LOCKED_BYTES = 2**26  # at a time


def sent(values: Any, device: torch.device) -> torch.Tensor:
    """An array or lists of numbers on a device; who asks does not wait for what a card does."""
    made = torch.as_tensor(values)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


class Piece(NamedTuple):
    """One contiguous (or strided) copy of equal-shaped arrays; None where nothing is stored."""

    destination: Any
    source: Any
    num_bytes: int


@dataclass(eq=False)
class BlockMemory:
    """Blocks [block, bytes] of a card, or of the host for one.

    stretch: a copy may not reach over a multiple of so many blocks. locked: a card may see all that
    are in use.
    """

    by_block: torch.Tensor
    stretch: int
    locked: bool = True


class LockedBlocks:
    """Zeros on the host, by block; page-locked a piece at a time, since locking touches all pages.

    A piece ends where both a block and a page end: a page is locked once, and no copy may reach
    from one piece into the next. Where nothing can be locked so, `pin_memory=True` gets all of it
    at once (not otherwise: that allocator rounds up to a power of two, and keeps what is freed).
    Memory that is refused later stays as it is: copies are right, and slower.

    memory: all of it, in such pieces.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        size, page = num_blocks * block_bytes, mmap.PAGESIZE
        whole = page // math.gcd(page, block_bytes)
        stretch = whole * max(1, _LOCKED_BYTES // (whole * block_bytes))
        self._owner = np.zeros(size + page, dtype=np.uint8)
        start = -self._owner.ctypes.data % page
        flat = torch.from_numpy(self._owner[start : start + size])
        self.memory = BlockMemory(flat.view(-1, block_bytes), stretch)
        self._num_locked = 0
        self.lock(1)
        if not self.memory.locked:
            flat = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self._owner, self._num_locked = flat.numpy(), num_blocks
            self.memory = BlockMemory(flat.view(-1, block_bytes), stretch)

    def lock(self, num_blocks: int) -> None:
        """The first blocks come into use."""
        while self._num_locked < num_blocks and self.memory.locked:
            end = self._num_locked + self.memory.stretch
            piece = self.memory.by_block[self._num_locked : end]
            cudart, address = torch.cuda.cudart(), piece.data_ptr()
            if int(cudart.cudaHostRegister(address, piece.nbytes, 0)):
                self.memory.locked = False
                with suppress(RuntimeError):
                    _ = torch.ones(1, device="cuda") + 1  # else the next launch reports it
                return
            weakref.finalize(self._owner, cudart.cudaHostUnregister, address)
            self._num_locked = end


class Blocks(NamedTuple):
    """One side of a piece that is many blocks, by number."""

    memory: BlockMemory
    numbers: tuple[int, ...]


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


_MANY, _LARGE_BYTES = 16, 2**20
"""So many copies, of less each on average, are one kernel's. Larger ones take no processors."""
_UNIT_BYTES = 16  # what the kernel loads at once


class CudaStreams:
    """`Streams` of a CUDA device; pieces are `Blocks`, or contiguous tensors, the host's pinned."""

    strided = False
    batches = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {direction: torch.cuda.Stream(device) for direction in Direction}

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> Copied:
        stream = self._side[direction]
        stream.wait_event(_event(torch.cuda.current_stream(self._device)))
        with torch.cuda.stream(stream):
            for piece in self._one_by_one(pieces):
                # Anything else would go through unpinned memory, and the host would wait.
                assert piece.destination.is_contiguous()
                assert piece.source.is_contiguous()
                piece.destination.copy_(piece.source, non_blocking=True)
        return _CudaCopied(_event(stream))

    def _one_by_one(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """What is worth a copy each. Blocks that are not are copied by a kernel here."""
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
            runs = _runs(numbers, there.stretch, here.stretch)
            small = len(runs) >= _MANY and numbers.shape[1] * block_bytes < len(runs) * _LARGE_BYTES
            if small and self._kernel_takes(there, here, numbers):
                continue
            for to, source, count in runs:
                sides = there.by_block[to : to + count], here.by_block[source : source + count]
                yield Piece(*sides, count * block_bytes)

    def _kernel_takes(
        self, there: BlockMemory, here: BlockMemory, numbers: NDArray[np.int32]
    ) -> bool:
        """Copy blocks by number in one launch. False: it cannot be done, and nothing was."""
        whole = there.by_block.shape[1] % _UNIT_BYTES == 0
        if not (whole and there.locked and here.locked) or self._copy_listed is None:
            return False
        try:
            self._copy_listed(there.by_block, here.by_block, numbers)
        except Exception:  # no compiler, or one that refuses: copies one by one are as right
            self._copy_listed = None
            return False
        return True

    @cached_property
    def _copy_listed(self) -> Callable[..., None] | None:
        """None where no kernel can copy; found out with the first blocks."""
        if find_spec("triton") is None:
            return None
        from beamwright.kv.copy_kernel import copy_listed, sees_host_memory  # noqa: PLC0415

        return copy_listed if sees_host_memory(self._device) else None

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


def _runs(numbers: NDArray[np.int32], *stretches: int) -> list[tuple[int, int, int]]:
    """(destination, source, blocks) of neighbours on both sides, within both sides' stretches.

    numbers: [destinations or sources, block].
    """
    parts = numbers // np.array(stretches)[:, None]
    breaks = ((np.diff(numbers) != 1) | (np.diff(parts) != 0)).any(axis=0)
    starts = np.flatnonzero(np.append(True, breaks))
    counts = np.diff(starts, append=numbers.shape[1])
    return list(zip(*numbers[:, starts].tolist(), counts.tolist(), strict=True))


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of what the stream has queued so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class _CudaCopied:
    ran_s: tuple[float, float] | None = None  # the card has a clock of its own

    def __init__(self, end: torch.cuda.Event) -> None:
        self.end, self._over = end, False

    def query(self) -> bool:
        self._over = self._over or bool(self.end.query())  # a batch's transfers ask one by one
        return self._over

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
