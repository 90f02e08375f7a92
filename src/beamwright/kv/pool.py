"""Block pools: the memory of the paged KV cache of one tier, its free list, and its byte budget.

A block holds `block_tokens` tokens of one node, for all layers, K and V, in one contiguous piece,
so that the link moves it in one transfer. Where layers are in groups (`models.shape.LayerGroup`), a
block belongs to one group. Blocks of all groups have equal bytes, and hold as many tokens as fit.
The simulator runs on `BlockLedger`s alone, which have no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from beamwright.errors import DEVICE_TIER, CapacityError, DeviceMemoryError, format_bytes
from beamwright.kv.codes import dequantise, quantise
from beamwright.kv.states import StateCells, StateLayout
from beamwright.kv.streams import BlockMemory, LockedBlocks
from beamwright.plan.blocks import choose_block_size
from beamwright.sections import KVDtype


class ScratchMeter:
    """Counter of bytes in use and of their peak, without a limit."""

    def __init__(self) -> None:
        self.used_bytes = self.peak_bytes = 0

    def count_unchecked(self, num_bytes: int) -> None:
        """Count `num_bytes` as used, whatever the limit; a negative number counts them as free."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def reset_peak(self) -> None:
        """Start a new peak measurement (one per solved batch)."""
        self.peak_bytes = self.used_bytes


class ByteBudget(ScratchMeter):
    """Byte counter with a limit. Call `charge` before memory is used, `release` when it is freed.

    tier: the memory's name in errors. hint: what errors advise.
    together: meter that also counts these bytes, shared by all budgets of one memory; or None.
    """

    def __init__(
        self,
        total_bytes: int,
        tier: str = DEVICE_TIER,
        hint: str = "raise --memory or --kv-memory, or lower --n",
        together: ScratchMeter | None = None,
    ) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.tier, self._hint, self._together = tier, hint, together

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be charged."""
        return self.total_bytes - self.used_bytes

    def count_unchecked(self, num_bytes: int) -> None:
        """Count `num_bytes` here and in `together`. Only `charge` compares them with the limit."""
        super().count_unchecked(num_bytes)
        if self._together is not None:
            self._together.count_unchecked(num_bytes)

    def charge(self, num_bytes: int, what: str) -> None:
        """Count `num_bytes` as used.

        Raises:
            CapacityError: if they do not fit; nothing is charged in that case.
        """
        free = self.free_bytes
        if num_bytes > free:
            raise CapacityError(what, num_bytes, free, self.total_bytes, self.tier, self._hint)
        self.count_unchecked(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` as free again."""
        if num_bytes > self.used_bytes:
            raise AssertionError(f"released {num_bytes} bytes, only {self.used_bytes} are in use")
        self.count_unchecked(-num_bytes)


_ALIGNED_BYTES = 256  # the second pool begins at a multiple of this, like an allocation of its own


class SharedPoolMemory(ScratchMeter):
    """Device memory that two pools (generator and verifier) divide, with a meter of both.

    Blocks of the first pool count from its beginning, those of the second from its end, so either
    can use bytes that the other does not. Budgets set the division. Bytes that move from one pool
    to the other are zeroed. most_block_bytes: size of a block in the pool with larger blocks.
    """

    def __init__(self, total_bytes: int, most_block_bytes: int) -> None:
        super().__init__()
        self.total_bytes, self._most = total_bytes, most_block_bytes
        self._flat: torch.Tensor | None = None

    def allocate_pool(self, block_bytes: int, device: str) -> tuple[torch.Tensor, int]:
        """Return the memory [block, bytes] of the next pool, and its first block's number.

        The pool's last block is a spare beyond the shared bytes; the other pool never uses it.
        """
        assert block_bytes <= self._most
        count, room = self.total_bytes // block_bytes, self.total_bytes + _ALIGNED_BYTES
        if self._flat is None:
            self._flat = allocate_zeros(room + 3 * self._most, device)
            end = -(-(room + self._most) // block_bytes) + 1
            return self._flat[: end * block_bytes].view(end, block_bytes), 0
        over = self.total_bytes - count * block_bytes
        start = -(-over // _ALIGNED_BYTES) * _ALIGNED_BYTES
        own = self._flat[start : start + (count + 1) * block_bytes]
        return own.view(count + 1, block_bytes), count - 1


def allocate_zeros(num_bytes: int, device: str) -> torch.Tensor:
    """Allocate zeros, since masked positions must not hold NaN. CPU pages commit on first use."""
    if device != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


@dataclass(frozen=True)
class BlockSpec:
    """What a block of one group of layers holds.

    window: size of the layers' sliding window in tokens; None: full attention.
    state_blocks: blocks that each segment has for its recurrent state; 0 in a group with KV.
    """

    block_tokens: int
    window: int | None = None
    state_blocks: int = 0

    @classmethod
    def of_states(cls, num_blocks: int) -> BlockSpec:
        """Return the group of recurrent states, of which each takes `num_blocks` blocks.

        A row reads only the last state before its own, as with a window of two tokens. No number of
        tokens fills a block, so a state is not stored on the host before its step is decoded.
        """
        return cls(1 << 62, 2, num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens of one segment need."""
        return self.state_blocks * (num_tokens > 0) or -(-num_tokens // self.block_tokens)


class BlockLedger:
    """Block allocator without memory. Free blocks nearest to the first block are taken first.

    bytes_per_token: of KV in all groups. block_tokens: tokens of a block in the first group.
    most_bytes: maximum budget of `resize`; None: the present one. block_bytes: bytes of a block.
    groups: groups of layers; by default one.
    memory: all blocks, if a GPU copies them by number; else None.
    """

    memory: BlockMemory | None = None

    def __init__(
        self,
        bytes_per_token: int,
        block_tokens: int,
        budget: ByteBudget,
        most_bytes: int | None = None,
        groups: Sequence[BlockSpec] = (),
        block_bytes: int | None = None,
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self.block_tokens = block_tokens
        self.groups = tuple(groups) or (BlockSpec(block_tokens),)
        self.bytes_per_block = block_bytes or bytes_per_token * block_tokens
        self.budget = budget
        self.num_blocks = budget.total_bytes // self.bytes_per_block
        self._most_bytes = budget.total_bytes if most_bytes is None else most_bytes
        self._most_blocks = self._most_bytes // self.bytes_per_block
        # Blocks are taken from one end. So memory never used stays uncommitted, and a segment's
        # blocks are neighbours that one copy moves. A place is a block's distance from `_first`.
        # `_returned` is a heap of freed places; all places from `_untouched` on are free.
        self._first = 0
        self._returned: list[int] = []
        self._untouched = 0
        self._used: set[int] = set()

    @property
    def has_states(self) -> bool:
        """True if the last group holds recurrent states."""
        return self.groups[-1].state_blocks > 0

    @property
    def num_free(self) -> int:
        """Number of blocks that are not allocated."""
        return self.num_blocks - len(self._used)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens of one node need in all groups."""
        return sum(group.blocks_for(num_tokens) for group in self.groups)

    def block_memory(self, block: int) -> Any:
        """Return the memory of a block, as the link copies it; None without memory."""
        del block

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate `num_blocks` blocks, or none.

        Raises:
            CapacityError: if the budget cannot hold them.
        """
        if num_blocks <= 0:
            return []
        self.budget.charge(num_blocks * self.bytes_per_block, "the next KV segment")
        taken = [heappop(self._returned) for _ in range(min(num_blocks, len(self._returned)))]
        first, self._untouched = self._untouched, self._untouched + num_blocks - len(taken)
        taken.extend(range(first, self._untouched))
        blocks = sorted([abs(self._first - place) for place in taken])
        self._used.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Free blocks. Freeing one twice is an AssertionError."""
        for block in blocks:
            if block not in self._used:
                raise AssertionError(f"block {block} was freed twice")
            self._used.remove(block)
            heappush(self._returned, abs(self._first - block))
        self.budget.release(len(blocks) * self.bytes_per_block)

    def resize(self, total_bytes: int) -> int:
        """Set the budget, at least what is used and at most `most_bytes`; return it in bytes."""
        total_bytes = max(min(total_bytes, self._most_bytes), self.budget.used_bytes)
        self.budget.total_bytes = total_bytes
        self.num_blocks = total_bytes // self.bytes_per_block
        return total_bytes

    def outside_budget(self, blocks: Sequence[int]) -> list[int]:
        """Return the indices in `blocks` of block numbers that lie outside a shrunk budget."""
        if self._untouched <= self.num_blocks:
            return []
        return [i for i, b in enumerate(blocks) if abs(self._first - b) >= self.num_blocks]

    def move_inside(self, owned: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Replace blocks outside the budget by free ones inside it, in place in these lists.

        Returns:
            The replaced blocks, and their replacements.
        """
        places = [(blocks, place) for blocks in owned for place in self.outside_budget(blocks)]
        source = [blocks[place] for blocks, place in places]
        self.free(source)
        destination = self.allocate(len(source))
        for (blocks, place), block in zip(places, destination, strict=True):
            blocks[place] = block
        return source, destination

    def forget_outside(self) -> range:
        """Forget the blocks beyond the end of a smaller budget, so another pool can use them.

        None of them may be allocated. Returns the places (distances from the pool's first block)
        of those that have been used before.
        """
        given = range(self.num_blocks, self._untouched)
        if given:
            self._untouched = self.num_blocks
            self._returned = sorted(place for place in self._returned if place not in given)
        return given

    def check(self, owned: list[int]) -> None:
        """Check conservation: `owned` blocks are distinct and not free, and all others are free."""
        if len(set(owned)) != len(owned):
            raise AssertionError("a block has two owners")
        if any(block not in self._used for block in owned):
            raise AssertionError("an owned block is on the free list")
        if len(owned) + self.num_free != self.num_blocks:
            raise AssertionError(
                f"{self.num_blocks} blocks, but {len(owned)} owned + {self.num_free} free"
            )


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV of one model, or of one group of its layers, and how attention reads it.

    dtype: the dtype in which attention reads. window: tokens that a token sees, itself included;
        None: all. softcap: scores become `softcap * tanh(score / softcap)`. kept: 8-bit format in
        which blocks store KV (see `codes`); "auto": `dtype`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = 8
    window: int | None = None
    softcap: float | None = None
    kept: KVDtype = "auto"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, as stored (maybe in 8 bits)."""
        if self.kept == "auto":
            return self.read_bytes_per_token
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim + 1)

    @property
    def read_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, in the dtype that attention reads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block."""
        return self.bytes_per_token * self.block_tokens


def equalise_block_bytes(layouts: Sequence[KVLayout]) -> tuple[KVLayout, ...]:
    """Choose each group's tokens per block, so that blocks of all groups have equal bytes."""
    _, tokens = choose_block_size([layout.bytes_per_token for layout in layouts])
    return tuple(replace(a, block_tokens=count) for a, count in zip(layouts, tokens, strict=True))


class BlockPool(BlockLedger):
    """Block allocator with memory, on a device or the host.

    layouts: one for each group of layers, see `equalise_block_bytes`.
    groups_kv: for each group, a view of all blocks as its KV.
    layout, kv, storage: layout, view and tensor of the first group. The tensor is
        [block, layer, K or V, token, kv_head, head_dim].
    states: layout of recurrent states, whose blocks are the last group; None: there are none.
    pinned: True: host memory, page-locked as blocks come into use, so that a GPU copies without
        staging. Other pools have a spare last block, where kernels write KV that is discarded.
    shared: memory that this pool divides with another one; see `CacheManager.resize`.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        budget: ByteBudget,
        device: str = "cpu",
        *,
        pinned: bool = False,
        shared: SharedPoolMemory | None = None,
        states: StateLayout | None = None,
    ) -> None:
        self.layouts = tuple(layouts)
        self.layout = layout = self.layouts[0]
        block_bytes = max(each.bytes_per_block for each in self.layouts)
        groups = [BlockSpec(each.block_tokens, each.window) for each in self.layouts]
        if states is not None:
            groups.append(BlockSpec.of_states(states.num_blocks(block_bytes)))
        token_bytes = sum(each.bytes_per_token for each in self.layouts)
        most_bytes = None if shared is None else shared.total_bytes
        super().__init__(token_bytes, layout.block_tokens, budget, most_bytes, groups, block_bytes)
        self._locked: LockedBlocks | None = None
        num_blocks = self._most_blocks + (not pinned)
        size = num_blocks * self.bytes_per_block
        try:
            if shared is not None:
                by_block, self._first = shared.allocate_pool(self.bytes_per_block, device)
            elif pinned and size:
                self._locked = LockedBlocks(self._most_blocks, self.bytes_per_block)
                by_block = self._locked.memory.by_block
            else:
                by_block = allocate_zeros(size, device).view(num_blocks, self.bytes_per_block)
        except (MemoryError, RuntimeError, OSError, ValueError) as error:  # from numpy or torch
            option = "--memory or --kv-memory" if budget.tier == DEVICE_TIER else "--host-memory"
            raise DeviceMemoryError(
                f"the {budget.tier} of {format_bytes(size)} cannot be allocated", f"lower {option}"
            ) from error
        self.by_block = by_block
        self.groups_kv = [KVBlockView.of(by_block, each) for each in self.layouts]
        self.kv = self.groups_kv[0]
        self.states = None if states is None else StateCells(by_block, states)
        self.storage = self.kv.storage
        if self._locked is not None:
            self.memory = self._locked.memory
        elif device != "cpu":
            self.memory = BlockMemory(by_block, max(1, self._most_blocks))
        # Copier threads copy arrays, CUDA streams copy tensors.
        self._bytes: Any = by_block.numpy() if self.memory is None else by_block

    def allocate(self, num_blocks: int) -> list[int]:
        taken = super().allocate(num_blocks)
        if self._locked is not None:
            self._locked.lock(self._untouched)
        return taken

    def block_memory(self, block: int) -> Any:
        """Return the memory of a block: an array, or a tensor if a GPU copies it."""
        return self._bytes[block]

    def forget_outside(self) -> range:
        if given := super().forget_outside():
            ends = sorted([abs(self._first - given[0]), abs(self._first - given[-1])])
            self.by_block[ends[0] : ends[1] + 1] = 0
        return given


@dataclass(frozen=True)
class KVBlockView:
    """The blocks of a pool, viewed as the KV of one group of layers.

    storage: [block, layer, K or V, token, kv_head, head_dim], values or their 8-bit codes.
        exponents: [block, layer, K or V, token, kv_head], the codes' scales; None without codes.
    """

    layout: KVLayout
    storage: torch.Tensor
    exponents: torch.Tensor | None = None

    @classmethod
    def of(cls, by_block: torch.Tensor, layout: KVLayout) -> KVBlockView:
        """View bytes [block, bytes] with this layout. A block's exponents follow its codes."""
        heads = layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads
        used = by_block[:, : layout.bytes_per_block]
        if layout.kept == "auto":
            return cls(layout, used.view(layout.dtype).unflatten(1, (*heads, layout.head_dim)))
        used, num_codes = used.view(torch.int8), math.prod(heads) * layout.head_dim
        codes = used[:, :num_codes].unflatten(1, (*heads, layout.head_dim))
        return cls(layout, codes, used[:, num_codes:].unflatten(1, heads))

    @property
    def block_tokens(self) -> int:
        """Number of tokens that a block holds."""
        return self.layout.block_tokens

    def read(self, at: Any) -> torch.Tensor:
        """Read KV at block numbers (a tensor), or at an index tuple for all but head_dim."""

        def read_part(part: torch.Tensor) -> torch.Tensor:
            return part.index_select(0, at) if isinstance(at, torch.Tensor) else part[at]

        if self.exponents is None:
            return read_part(self.storage)
        codes, exponents = read_part(self.storage), read_part(self.exponents)
        return dequantise(codes, exponents, self.layout.kept, self.layout.dtype)

    def write(self, at: Any, values: torch.Tensor) -> None:
        """Write KV, quantised if necessary. at: index tuple for all dimensions but head_dim."""
        if self.exponents is None:
            self.storage[at] = values.to(self.storage.dtype)
        else:
            self.storage[at], self.exponents[at] = quantise(values, self.layout.kept)
