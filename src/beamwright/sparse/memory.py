"""RowMemory: what a row's last tokens leave for its next ones.

It begins anew with each step, so it is no part of a path: nobody copies it at a fork, and no
checkpoint has to store it. Between views it waits in the segment that the row writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from beamwright.kv.segments import Segment


@dataclass
class RowMemory:
    """Of one row, by layer.

    queries: of its step's tokens, the newest last [count, heads, head_dim].
    kept: the positions [kv_heads, count] that are not evicted, of the first so many.
    """

    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def push(self, layer: int, query: torch.Tensor, most: int) -> None:
        """Note a token's query [heads, head_dim]; `most` are kept."""
        known = self.queries.get(layer)
        new = query.unsqueeze(0)
        joined = new.clone() if known is None else torch.cat([known[-most + 1 :], new])
        self.queries[layer] = joined

    def window(self, layer: int, lag: int, most: int) -> torch.Tensor | None:
        """Queries [count, heads, head_dim] up to that of `lag` tokens before; None without any."""
        known = self.queries.get(layer)
        count = 0 if known is None else len(known) - (lag - 1)
        if known is None or count <= 0:
            return None
        return known[max(0, count - most) : count]

    def keep(self, layer: int, positions: torch.Tensor, visible: int) -> None:
        """Of so many tokens these positions [kv_heads, count] are not evicted."""
        self.kept[layer] = positions, visible

    def left(self, layer: int, kv_heads: int, positions: torch.Tensor) -> torch.Tensor:
        """Which of these positions [columns] are not evicted [kv_heads, columns]."""
        if layer not in self.kept:
            return positions.new_ones((kv_heads, len(positions)), dtype=torch.bool)
        kept, visible = self.kept[layer]
        alive = positions.new_zeros((kv_heads, int(positions.max()) + 1), dtype=torch.bool)
        alive.scatter_(1, kept, value=True)
        alive[:, visible:] = True
        return alive[:, positions.clamp_min(0)]


def memories(segments: Sequence[Segment | None]) -> list[RowMemory]:
    """Of the rows that write these segments; None pads the batch."""
    found = []
    for segment in segments:
        if segment is None:
            found.append(RowMemory())
            continue
        if segment.memory is None:
            segment.memory = RowMemory()
        found.append(segment.memory)
    return found
