"""KV of models whose layers are in groups: what reads one group's, and the tails of all.

Attention of a group reads its segments through a `KVReader`, as it reads a whole store of a model
with one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from beamwright.kv.pool import KVBlocks, ScratchMeter
from beamwright.kv.segments import Segment


class KVReader:
    """Reads the KV of one group of layers.

    kv: what the pool's blocks hold of it. compute_device: where attention's working copies reside.
    scratch: their bytes.
    """

    def __init__(self, kv: KVBlocks, compute_device: torch.device, scratch: ScratchMeter) -> None:
        self.kv, self.compute_device, self.scratch = kv, compute_device, scratch

    def gather(self, segment: Segment, visible: int, copy: int = 0) -> torch.Tensor:
        """[layers, 2, visible, kv_heads, head_dim] of a segment's first `visible` tokens.

        copy: which device copy is read, where there are several.
        """
        count = segment.blocks_for(visible)
        held = segment.copies[min(copy, len(segment.copies) - 1)] if segment.copies else []
        if len(held) < count:
            raise AssertionError(f"segment {segment.name!r} is read, but not on the device")
        blocks = torch.tensor(held[:count], device=self.kv.storage.device, dtype=torch.long)
        picked = self.kv.pick(blocks)
        return picked.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :visible]


class GroupTails:
    """Tails of all groups, whose rows are the same: to a session as one of them (`store.Tail`).

    What is restored and taken of a row are a group's tokens, by group.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.capacity = tuple(parts), int(parts[0].capacity)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parts[0], name)  # how many rows and tokens there are, and where

    @property
    def num_moves(self) -> int:
        """How often memory was allocated anew."""
        return sum(part.num_moves for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Of all groups."""
        return sum(part.num_bytes for part in self.parts)

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Go on with these rows in this order, and with free ones behind them."""
        for part in self.parts:
            part.arrange(kept, num_rows)

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Put back a row's tokens, [layers, 2, tokens, kv_heads, head_dim] by group."""
        for part, tokens in zip(self.parts, held, strict=True):
            part.restore(row, tokens)

    def begin(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Rows hold so many tokens each, and get up to `max_tokens` more; None for unread rows."""
        for part in self.parts:
            part.begin(lengths, max_tokens)

    def advance(self) -> None:
        """The current token is complete."""
        for part in self.parts:
            part.advance()

    def spread(self, rows: torch.Tensor, places: torch.Tensor, written: torch.Tensor) -> None:
        """Of the next pass token i is row rows[i]'s, see `RowTails.spread`."""
        for part in self.parts:
            part.spread(rows, places, written)

    def together(self) -> None:
        """Passes are over one token of every row again."""
        for part in self.parts:
            part.together()

    def take(self, row: int, first: int, end: int) -> list[torch.Tensor]:
        """A row's tokens [first, end), by group."""
        return [part.take(row, first, end) for part in self.parts]

    def close(self) -> None:
        """No rows are left."""
        for part in self.parts:
            part.close()

    def release(self) -> None:
        """Give the memory back."""
        for part in self.parts:
            part.release()
