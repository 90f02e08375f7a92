"""BlockPool: a ledger of blocks and the memory that they are in.

A block holds `block_tokens` tokens of one node, for all layers, K and V, in one contiguous piece,
so that the link moves it in one transfer.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from beamwright.errors import DEVICE_TIER, DeviceMemoryError, format_bytes
from beamwright.kv.budget import ByteBudget
from beamwright.kv.ledger import BlockLedger


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV of one model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = 8

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block."""
        return self.bytes_per_token * self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one segment need."""
        return -(-num_tokens // self.block_tokens)


class BlockPool(BlockLedger):
    """Blocks [block, layer, K or V, token, kv_head, head_dim] of one tier.

    pinned: host memory that is page-locked as its blocks come into use, so that a GPU copies from
        and to it without staging.
    most_bytes: see `BlockLedger`; address space for as much is taken at once.
    """

    def __init__(
        self,
        layout: KVLayout,
        budget: ByteBudget,
        device: str = "cpu",
        *,
        pinned: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        super().__init__(layout.bytes_per_token, layout.block_tokens, budget, most_bytes)
        self.layout = layout
        self._pages: mmap.mmap | None = None
        self._locked: LockedBlocks | None = None
        shape = (
            self._most_blocks,
            layout.num_layers,
            2,
            layout.block_tokens,
            layout.num_kv_heads,
            layout.head_dim,
        )
        try:
            if most_bytes is not None and device == "cpu" and not pinned:
                self._pages = _own_pages(self._most_blocks * layout.bytes_per_block)
            if pinned and self._most_blocks:
                self._locked = LockedBlocks(self._most_blocks, layout.bytes_per_block)
                self.storage = self._locked.storage(shape, layout.dtype)
            else:
                self.storage = _lazy_zeros(shape, layout.dtype, device, self._pages)
        except (MemoryError, RuntimeError, OSError) as error:  # torch says it with RuntimeErrors
            size = format_bytes(self._most_blocks * layout.bytes_per_block)
            option = "--memory or --kv-memory" if budget.tier == DEVICE_TIER else "--host-memory"
            raise DeviceMemoryError(
                f"the {budget.tier} of {size} cannot be allocated", f"lower {option}"
            ) from error
        self._bytes: Any = None
        if self._most_blocks:
            flat = self.storage.view(self._most_blocks, -1).view(torch.uint8)
            # A copier thread copies arrays, a stream tensors.
            # Merged copies must not cross from one locked piece into the next.
            self._bytes = self._locked or (flat if device != "cpu" else flat.numpy())

    def allocate(self, num_blocks: int) -> list[int]:
        taken = super().allocate(num_blocks)
        if self._locked is not None:
            self._locked.lock(self._untouched)
        return taken

    def block_bytes(self, block: int) -> Any:
        """The bytes of one block, as a view that the link can read or write.

        An array, or a tensor where the pool is on a GPU or pinned for one.
        """
        return self._bytes[block]

    def give_back(self, blocks: list[int]) -> None:
        """Pages that lie wholly within these blocks are the operating system's; zeros next time."""
        if self._pages is None:
            return
        size, page = self.bytes_per_block, mmap.PAGESIZE
        for first, count in _runs(blocks):
            start = -(-first * size // page) * page
            end = (first + count) * size // page * page
            if end > start:
                self._pages.madvise(mmap.MADV_DONTNEED, start, end - start)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, how many) of numbers that follow each other."""
    first = count = 0
    for number in sorted(numbers):
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


def _lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, pages: Any
) -> torch.Tensor:
    """Zeros whose pages the operating system commits on first touch (CPU).

    Zeros, because a masked position must never hold NaN bits left over from other memory.
    pages: where they are, if that is known.
    """
    if device != "cpu" or not shape[0]:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if pages is not None:
        memory = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)
    else:
        memory = np.zeros(num_bytes, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def _own_pages(num_bytes: int) -> mmap.mmap | None:
    """Memory whose pages can be given back; None where the operating system does not offer it."""
    if not num_bytes or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_PIECE_BYTES = 2**26


class LockedBlocks:
    """Zeros on the host, by block; page-locked a piece at a time, since locking touches all pages.

    A piece ends where both a block and a page end: a page is locked once, and no copy may reach
    from one piece into the next. Where nothing can be locked so, `pin_memory=True` gets all of it
    at once (not otherwise: that allocator rounds up to a power of two, and keeps what is freed).
    Memory that is refused later stays as it is: copies are right, and slower.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        size, page = num_blocks * block_bytes, mmap.PAGESIZE
        whole = page // math.gcd(page, block_bytes)
        self._blocks = whole * max(1, _PIECE_BYTES // (whole * block_bytes))  # of a piece
        self._owner = np.zeros(size + page, dtype=np.uint8)
        start = -self._owner.ctypes.data % page
        self._memory = self._owner[start : start + size]
        self._block_bytes, self._num_locked, self._refused = block_bytes, 0, False
        self._whole = None
        self.lock(1)
        if self._refused:
            self._whole = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self._memory = self._owner = self._whole.numpy()
        piece_bytes = self._blocks * block_bytes
        self._pieces = [
            torch.from_numpy(self._memory[first : first + piece_bytes]).view(-1, block_bytes)
            for first in range(0, size, piece_bytes)
        ]

    def storage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as one tensor, for what the host computes."""
        whole = torch.from_numpy(self._memory) if self._whole is None else self._whole
        return whole.view(dtype).view(shape)

    def __getitem__(self, block: int) -> torch.Tensor:
        piece, place = divmod(block, self._blocks)
        return self._pieces[piece][place]

    def lock(self, num_blocks: int) -> None:
        """The first blocks come into use."""
        while self._num_locked < num_blocks and not self._refused:
            first = self._num_locked * self._block_bytes
            piece = self._memory[first : first + self._blocks * self._block_bytes]
            cudart, address = torch.cuda.cudart(), piece.ctypes.data
            if int(cudart.cudaHostRegister(address, piece.nbytes, 0)):
                self._refused = True
                with suppress(RuntimeError):
                    _ = torch.ones(1, device="cuda") + 1  # else the next launch reports it
                return
            weakref.finalize(self._owner, cudart.cudaHostUnregister, address)
            self._num_locked += self._blocks
