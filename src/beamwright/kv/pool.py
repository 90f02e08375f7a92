"""Blocks of KV, each owned by at most one copy of a segment: bytes, ids, and the memory itself.

A block holds `block_tokens` tokens of one node, for all layers, K and V, in one contiguous piece,
so that the link moves it in one transfer. Where layers are in groups (`models.shape.LayerGroup`), a
block is of one group; those of all groups have as many bytes, and hold as many tokens as fit. The
simulator runs on `BlockLedger`s alone, without memory. Knows no segments.
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
from beamwright.kv.codes import decoded, encoded
from beamwright.kv.states import StateCells, StateLayout
from beamwright.kv.streams import BlockMemory, LockedBlocks
from beamwright.plan.costs import group_blocks
from beamwright.sections import KVDtype


class ScratchMeter:
    """Counts bytes of working memory and their peak; it has no ceiling."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes (negative: give them back)."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def reset_peak(self) -> None:
        """Start a new peak measurement (one per solved batch)."""
        self.peak_bytes = self.used_bytes


class ByteBudget(ScratchMeter):
    """A counter with a ceiling. `charge` before memory is used, `release` when it is not.

    tier, hint: how an error names this budget, and what it advises.
    together: also counts what several budgets use, which have memory in common.
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

    def add(self, num_bytes: int) -> None:
        super().add(num_bytes)
        if self._together is not None:
            self._together.add(num_bytes)

    def charge(self, num_bytes: int, what: str) -> None:
        """Count `num_bytes` as used.

        Raises:
            CapacityError: if they do not fit, which says how much is missing; nothing is charged.
        """
        free = self.free_bytes
        if num_bytes > free:
            raise CapacityError(what, num_bytes, free, self.total_bytes, self.tier, self._hint)
        self.add(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` as free again."""
        if num_bytes > self.used_bytes:
            raise AssertionError(f"released {num_bytes} bytes, only {self.used_bytes} are in use")
        self.add(-num_bytes)


_ALIGNED_BYTES = 256  # as memory of its own is


class SharedMemory(ScratchMeter):
    """Memory of two pools, and the bytes that both use: blocks of the first count from its
    beginning, those of the second from its end, so either may have what the other has not.

    Budgets say who has how much. All is zeros where no block has been since it changed hands.
    most_block_bytes: of a block of either pool.
    """

    def __init__(self, total_bytes: int, most_block_bytes: int) -> None:
        super().__init__()
        self.total_bytes, self._most = total_bytes, most_block_bytes
        self._flat: torch.Tensor | None = None

    def blocks(self, block_bytes: int, device: str) -> tuple[torch.Tensor, int]:
        """Bytes [block, bytes] of the next pool, and which block is its first one. The last one is
        nobody's, behind all that is shared, and another than the other pool's."""
        assert block_bytes <= self._most
        count, room = self.total_bytes // block_bytes, self.total_bytes + _ALIGNED_BYTES
        if self._flat is None:
            self._flat = zeros(room + 3 * self._most, device)
            end = -(-(room + self._most) // block_bytes) + 1
            return self._flat[: end * block_bytes].view(end, block_bytes), 0
        over = self.total_bytes - count * block_bytes
        start = -(-over // _ALIGNED_BYTES) * _ALIGNED_BYTES
        own = self._flat[start : start + (count + 1) * block_bytes]
        return own.view(count + 1, block_bytes), count - 1


def zeros(num_bytes: int, device: str) -> torch.Tensor:
    """Zeros, because a masked position must never hold NaN bits left over from other memory.

    On a CPU their pages are committed on first touch.
    """
    if device != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


@dataclass(frozen=True)
class GroupBlocks:
    """What blocks of one group of layers hold. window: tokens that its layers see, None for all.

    fixed: blocks of a segment of any length, where they hold a state and not its tokens' KV.
    """

    block_tokens: int
    window: int | None = None
    fixed: int = 0

    @classmethod
    def of_states(cls, num_blocks: int) -> GroupBlocks:
        """States of so many blocks. A row reads that right before it and no other, as with a window
        of two tokens; a block is never full, so nothing is stored before a step is complete."""
        return cls(1 << 62, 2, num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one segment need."""
        return self.fixed * (num_tokens > 0) or -(-num_tokens // self.block_tokens)


class BlockLedger:
    """Blocks of `block_tokens` tokens; those that are free and nearest to the first come first.

    `check` verifies free + owned = total.
    most_bytes: how far `resize` can go; by default the budget is what it is.
    groups: of layers; by default there is one. block_bytes: of any group's block; bytes_per_token
    are those of all groups together, block_tokens those of the first.
    memory: all blocks, of which a card copies by number; None where none does.
    """

    memory: BlockMemory | None = None

    def __init__(
        self,
        bytes_per_token: int,
        block_tokens: int,
        budget: ByteBudget,
        most_bytes: int | None = None,
        groups: Sequence[GroupBlocks] = (),
        block_bytes: int | None = None,
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self.block_tokens = block_tokens
        self.groups = tuple(groups) or (GroupBlocks(block_tokens),)
        self.bytes_per_block = block_bytes or bytes_per_token * block_tokens
        self.budget = budget
        self.num_blocks = budget.total_bytes // self.bytes_per_block
        self._most_bytes = budget.total_bytes if most_bytes is None else most_bytes
        self._most_blocks = self._most_bytes // self.bytes_per_block  # ids that there are
        # Blocks are handed out from one end, so that untouched memory stays uncommitted, and a
        # segment's are neighbours, which one copy moves: `_returned` is the heap of those used
        # before, counted from the first one; all from `_untouched` on are free.
        self._first = 0
        self._returned: list[int] = []
        self._untouched = 0
        self._used: set[int] = set()

    @property
    def has_states(self) -> bool:
        """Whether the last group is of states."""
        return self.groups[-1].fixed > 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return self.num_blocks - len(self._used)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one node need, in all groups."""
        return sum(group.blocks_for(num_tokens) for group in self.groups)

    def block_bytes(self, block: int) -> Any:
        """The bytes of a block, as the link moves them; None without memory."""
        del block

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks. All or nothing.

        Raises:
            CapacityError: if the budget cannot hold them.
        """
        if num_blocks <= 0:
            return []
        self.budget.charge(num_blocks * self.bytes_per_block, f"a segment of {num_blocks} blocks")
        taken = [heappop(self._returned) for _ in range(min(num_blocks, len(self._returned)))]
        first, self._untouched = self._untouched, self._untouched + num_blocks - len(taken)
        taken.extend(range(first, self._untouched))
        blocks = sorted([abs(self._first - place) for place in taken])
        self._used.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back; a block given back twice is an AssertionError."""
        for block in blocks:
            if block not in self._used:
                raise AssertionError(f"block {block} was freed twice")
            self._used.remove(block)
            heappush(self._returned, abs(self._first - block))
        self.budget.release(len(blocks) * self.bytes_per_block)

    def resize(self, total_bytes: int) -> int:
        """Make the budget this large; no smaller than what is used, no larger than `most_bytes`.

        Returns:
            The budget in bytes.
        """
        total_bytes = max(min(total_bytes, self._most_bytes), self.budget.used_bytes)
        self.budget.total_bytes = total_bytes
        self.num_blocks = total_bytes // self.bytes_per_block
        return total_bytes

    def beyond(self, blocks: Sequence[int]) -> list[int]:
        """Places in this list of blocks that the budget, made smaller, has no room for."""
        if self._untouched <= self.num_blocks:
            return []
        return [i for i, b in enumerate(blocks) if abs(self._first - b) >= self.num_blocks]

    def draw_in(self, owned: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Give what lies beyond the budget in these lists other blocks, in place.

        Returns:
            The blocks that were left, and those that took their place.
        """
        places = [(blocks, place) for blocks in owned for place in self.beyond(blocks)]
        source = [blocks[place] for blocks, place in places]
        self.free(source)
        destination = self.allocate(len(source))
        for (blocks, place), block in zip(places, destination, strict=True):
            blocks[place] = block
        return source, destination

    def give_back(self) -> range:
        """Nobody has a block beyond the budget any more: forget those that were used, as places
        counted from the first; they are somebody else's now."""
        given = range(self.num_blocks, self._untouched)
        if given:
            self._untouched = self.num_blocks
            self._returned = sorted(place for place in self._returned if place not in given)
        return given

    def check(self, owned: list[int]) -> None:
        """Conservation: `owned` blocks are distinct, not free, and all others are free."""
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
    """Shape of the KV of one model, or of some of its layers, and how attention reads it.

    dtype: in which attention reads it. window: how many tokens a token sees, itself included; None
    for all. softcap: scores become `softcap * tanh(score / softcap)`. kept: see `codes`.
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
        """K and V of one token over all layers, as blocks keep them."""
        if self.kept == "auto":
            return self.read_bytes_per_token
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim + 1)

    @property
    def read_bytes_per_token(self) -> int:
        """The same as attention reads them."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block."""
        return self.bytes_per_token * self.block_tokens


def group_layouts(layouts: Sequence[KVLayout]) -> tuple[KVLayout, ...]:
    """The same with tokens per block as `plan.costs.group_blocks` has them."""
    _, tokens = group_blocks([layout.bytes_per_token for layout in layouts])
    return tuple(replace(a, block_tokens=count) for a, count in zip(layouts, tokens, strict=True))


class BlockPool(BlockLedger):
    """Blocks [block, layer, K or V, token, kv_head, head_dim] of one tier, in `storage`.

    layouts: of each group of layers, see `group_layouts`. groups_kv: what blocks hold of each, over
    the same bytes. layout, kv, storage: of the first.
    states: of recurrent layers; they are the last group, in blocks of those bytes.

    Behind the others is a block that nobody owns: there kernels put what is not kept.
    pinned: host memory that is page-locked as its blocks come into use, so that a GPU copies from
        and to it without staging.
    shared: where the blocks are, if another pool may have the rest; see `CacheManager.resize`.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        budget: ByteBudget,
        device: str = "cpu",
        *,
        pinned: bool = False,
        shared: SharedMemory | None = None,
        states: StateLayout | None = None,
    ) -> None:
        self.layouts = tuple(layouts)
        self.layout = layout = self.layouts[0]
        block_bytes = max(each.bytes_per_block for each in self.layouts)
        groups = [GroupBlocks(each.block_tokens, each.window) for each in self.layouts]
        if states is not None:
            groups.append(GroupBlocks.of_states(states.num_blocks(block_bytes)))
        token_bytes = sum(each.bytes_per_token for each in self.layouts)
        most_bytes = None if shared is None else shared.total_bytes
        super().__init__(token_bytes, layout.block_tokens, budget, most_bytes, groups, block_bytes)
        self._locked: LockedBlocks | None = None
        num_blocks = self._most_blocks + (not pinned)
        size = num_blocks * self.bytes_per_block
        try:
            if shared is not None:
                by_block, self._first = shared.blocks(self.bytes_per_block, device)
            elif pinned and size:
                self._locked = LockedBlocks(self._most_blocks, self.bytes_per_block)
                by_block = self._locked.memory.by_block
            else:
                by_block = zeros(size, device).view(num_blocks, self.bytes_per_block)
        except (MemoryError, RuntimeError, OSError, ValueError) as error:  # numpy's, torch's
            option = "--memory or --kv-memory" if budget.tier == DEVICE_TIER else "--host-memory"
            raise DeviceMemoryError(
                f"the {budget.tier} of {format_bytes(size)} cannot be allocated", f"lower {option}"
            ) from error
        self.by_block = by_block
        self.groups_kv = [KVBlocks.of(by_block, each) for each in self.layouts]
        self.kv = self.groups_kv[0]
        self.states = None if states is None else StateCells(by_block, states)
        self.storage = self.kv.storage
        if self._locked is not None:
            self.memory = self._locked.memory
        elif device != "cpu":
            self.memory = BlockMemory(by_block, max(1, self._most_blocks))
        # A copier thread copies arrays, a stream tensors.
        self._bytes: Any = by_block.numpy() if self.memory is None else by_block

    def allocate(self, num_blocks: int) -> list[int]:
        taken = super().allocate(num_blocks)
        if self._locked is not None:
            self._locked.lock(self._untouched)
        return taken

    def block_bytes(self, block: int) -> Any:
        """An array, or a tensor where the pool is on a GPU or pinned for one."""
        return self._bytes[block]

    def give_back(self) -> range:
        if given := super().give_back():
            ends = sorted([abs(self._first - given[0]), abs(self._first - given[-1])])
            self.by_block[ends[0] : ends[1] + 1] = 0
        return given


@dataclass(frozen=True)
class KVBlocks:
    """What blocks hold of one group of layers.

    storage: [block, layer, K or V, token, kv_head, head_dim], numbers, or their codes. exponents:
    the same without head_dim, where there are codes; they are behind a block's codes.
    """

    layout: KVLayout
    storage: torch.Tensor
    exponents: torch.Tensor | None = None

    @classmethod
    def of(cls, by_block: torch.Tensor, layout: KVLayout) -> KVBlocks:
        """Of bytes [block, bytes]."""
        heads = layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads
        used = by_block[:, : layout.bytes_per_block]
        if layout.kept == "auto":
            return cls(layout, used.view(layout.dtype).unflatten(1, (*heads, layout.head_dim)))
        used, num_codes = used.view(torch.int8), math.prod(heads) * layout.head_dim
        codes = used[:, :num_codes].unflatten(1, (*heads, layout.head_dim))
        return cls(layout, codes, used[:, num_codes:].unflatten(1, heads))

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.layout.block_tokens

    def pick(self, at: Any) -> torch.Tensor:
        """Numbers at an index of storage that ends before head_dim; blocks, where it is a list."""

        def picked(part: torch.Tensor) -> torch.Tensor:
            return part.index_select(0, at) if isinstance(at, torch.Tensor) else part[at]

        if self.exponents is None:
            return picked(self.storage)
        codes, exponents = picked(self.storage), picked(self.exponents)
        return decoded(codes, exponents, self.layout.kept, self.layout.dtype)

    def put(self, at: Any, values: torch.Tensor) -> None:
        """Write numbers there."""
        if self.exponents is None:
            self.storage[at] = values.to(self.storage.dtype)
        else:
            self.storage[at], self.exponents[at] = encoded(values, self.layout.kept)
