"""KV of models whose layers are in groups: what reads one group's, and the tails of all.

Attention of a group reads its segments through a `KVReader`, as it reads a whole store of a model
with one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from beamwright.kv.pool import KVBlocks, ScratchMeter
from beamwright.kv.segments import Segment


def to_each(name: str) -> Callable[..., None]:
    """A method that calls the one of that name of every one of `self.parts`, in order."""

    def call(self: Any, *args: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args)

    return call


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
    """Tails of all groups, whose rows are the same: to a session as one of them (`tails.Tail`).

    What is restored and taken of a row are a group's tokens, by group.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.capacity = tuple(parts), int(parts[0].capacity)

    arrange, begin, advance = to_each("arrange"), to_each("begin"), to_each("advance")
    find = to_each("find")
    spread, together = to_each("spread"), to_each("together")
    close, release = to_each("close"), to_each("release")

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

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Put back a row's tokens, [layers, 2, tokens, kv_heads, head_dim] by group."""
        for part, tokens in zip(self.parts, held, strict=True):
            part.restore(row, tokens)

    def take(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Tokens of rows, by group."""
        return [values for each in self.parts for values in each.take(parts)]
