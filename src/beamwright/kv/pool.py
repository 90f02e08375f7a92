"""BlockPool: a ledger of blocks and the memory that they are in.

A block holds `block_tokens` tokens of one node, for all layers, K and V, in one contiguous piece,
so that the link moves it in one transfer.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
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

    pinned: page-locked host memory, which a GPU copies from and to without staging.
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
            self.storage = _lazy_zeros(shape, layout.dtype, device, pinned, self._pages)
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
            self._bytes = flat if pinned or device != "cpu" else flat.numpy()

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
    shape: tuple[int, ...], dtype: torch.dtype, device: str, pinned: bool, pages: Any
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
    if pinned:
        _pin(memory)
    return torch.from_numpy(memory).view(dtype).view(shape)


def _own_pages(num_bytes: int) -> mmap.mmap | None:
    """Memory whose pages can be given back; None where the operating system does not offer it."""
    if not num_bytes or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _pin(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Page-lock an array while it lives.

    Not by `pin_memory=True`: that allocator rounds up to a power of two, and keeps what is freed.
    """
    cudart, address = torch.cuda.cudart(), memory.ctypes.data
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
    weakref.finalize(memory, cudart.cudaHostUnregister, address)
