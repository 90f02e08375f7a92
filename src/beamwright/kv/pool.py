"""BlockPool: fixed-size KV blocks with O(1) allocation.

A block holds `block_tokens` tokens of one node, for all layers, K and V, in one contiguous piece,
so that a later tier can move it in one transfer (FACTS 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from beamwright.kv.budget import DeviceBudget


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV of one model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = 16

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


class BlockPool:
    """Blocks [block, layer, K or V, token, kv_head, head_dim]; ids come from a free stack.

    Every block is owned by at most one segment. `check` verifies free + owned = total.
    """

    def __init__(self, layout: KVLayout, budget: DeviceBudget, device: str = "cpu") -> None:
        self.layout = layout
        self.budget = budget
        self.num_blocks = max(1, budget.total_bytes // layout.bytes_per_block)
        shape = (
            self.num_blocks,
            layout.num_layers,
            2,
            layout.block_tokens,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.storage = _lazy_zeros(shape, layout.dtype, device)
        # Blocks are handed out from the low end first, so untouched memory stays uncommitted.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks on the free stack."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks. All or nothing.

        Raises:
            CapacityError: if the budget cannot hold them.
        """
        if num_blocks <= 0:
            return []
        # Blocks are part of the budget, so a charge that succeeds always finds free blocks.
        self.budget.charge(
            num_blocks * self.layout.bytes_per_block, f"a segment of {num_blocks} blocks"
        )
        taken = self._free[-num_blocks:][::-1]
        del self._free[-num_blocks:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back; a block given back twice is an AssertionError."""
        for block in blocks:
            if self._is_free[block]:
                raise AssertionError(f"block {block} was freed twice")
            self._is_free[block] = 1
        self._free.extend(reversed(blocks))
        self.budget.release(len(blocks) * self.layout.bytes_per_block)

    def check(self, owned: list[int]) -> None:
        """Conservation: `owned` blocks are distinct, not free, and all others are free."""
        if len(set(owned)) != len(owned):
            raise AssertionError("a block has two owners")
        if any(self._is_free[block] for block in owned):
            raise AssertionError("an owned block is on the free list")
        if len(owned) + len(self._free) != self.num_blocks:
            raise AssertionError(
                f"{self.num_blocks} blocks, but {len(owned)} owned + {len(self._free)} free"
            )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros whose pages the operating system commits on first touch (CPU).

    Zeros, because a masked position must never hold NaN bits left over from other memory.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
