"""Segments: the KV of one node, node-aligned. A path is a tuple of (segment, visible tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from beamwright.kv.pool import BlockPool


@dataclass(eq=False)
class Segment:
    """KV of one node: starts a fresh block, and ends anywhere inside its last one.

    length: tokens written so far.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    freed: bool = False


@dataclass(frozen=True)
class PathPart:
    """The first `visible` tokens of a segment, as one path sees it."""

    segment: Segment
    visible: int


Path = tuple[PathPart, ...]


def truncate_path(path: Path, num_tokens: int) -> Path:
    """The first `num_tokens` tokens of a path (a child that diverges inside its parent's KV)."""
    parts: list[PathPart] = []
    left = num_tokens
    for part in path:
        if left <= 0:
            break
        parts.append(PathPart(part.segment, min(part.visible, left)))
        left -= part.visible
    return tuple(parts)


class SegmentStore:
    """Creates, extends, reads and frees segments in one block pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._segments: set[Segment] = set()

    def create(self) -> Segment:
        """An empty segment that owns no block yet."""
        segment = Segment()
        self._segments.add(segment)
        return segment

    def append(self, segments: Sequence[Segment], key_values: Sequence[torch.Tensor]) -> None:
        """Write new tokens at the end of each segment.

        key_values: one [tokens, layers, 2, kv_heads, head_dim] per segment.

        Raises:
            CapacityError: if the blocks do not fit; no segment has changed then.
        """
        layout = self.pool.layout
        lengths = [int(values.shape[0]) for values in key_values]
        missing = [
            layout.num_blocks(segment.length + length) - len(segment.blocks)
            for segment, length in zip(segments, lengths, strict=True)
        ]
        fresh = self.pool.allocate(sum(missing))
        block_ids: list[int] = []
        offsets: list[int] = []
        taken = 0
        for segment, length, count in zip(segments, lengths, missing, strict=True):
            segment.blocks.extend(fresh[taken : taken + count])
            taken += count
            for position in range(segment.length, segment.length + length):
                block_ids.append(segment.blocks[position // layout.block_tokens])
                offsets.append(position % layout.block_tokens)
            segment.length += length
        if block_ids:
            storage = self.pool.storage
            blocks = torch.tensor(block_ids, device=storage.device)
            slots = torch.tensor(offsets, device=storage.device)
            values = torch.cat(list(key_values)) if len(key_values) > 1 else key_values[0]
            storage[blocks, :, :, slots] = values.to(storage.dtype)

    def gather(self, segment: Segment, visible: int) -> torch.Tensor:
        """[layers, 2, visible, kv_heads, head_dim] of a segment's first `visible` tokens."""
        storage = self.pool.storage
        count = self.pool.layout.num_blocks(visible)
        blocks = torch.tensor(segment.blocks[:count], device=storage.device, dtype=torch.long)
        picked = storage.index_select(0, blocks)
        merged = picked.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        return merged[:, :, :visible]

    def free(self, segment: Segment) -> None:
        """Free a segment's blocks at once; freeing it twice is an AssertionError."""
        if segment.freed:
            raise AssertionError("a segment was freed twice")
        segment.freed = True
        self._segments.discard(segment)
        self.pool.free(segment.blocks)
        segment.blocks = []

    @property
    def num_segments(self) -> int:
        """Segments that are not freed."""
        return len(self._segments)

    def check(self) -> None:
        """Conservation: every block is free or owned by exactly one live segment."""
        owned = [block for segment in self._segments for block in segment.blocks]
        self.pool.check(owned)
        for segment in self._segments:
            if self.pool.layout.num_blocks(segment.length) != len(segment.blocks):
                raise AssertionError(f"{segment.length} tokens in {len(segment.blocks)} blocks")
