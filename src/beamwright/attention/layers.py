"""Where the layers of a packed working copy reside. Knows no attention and no link.

Attention asks a source for one layer at a time, and the answer may wait: resident layers are plain
indexing, `layerwise` streams them (LBS section 4.1, the token-by-token baseline).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from beamwright.kv.segments import Path, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail


@dataclass(frozen=True)
class Entry:
    """What is at one place along the entries of a packed copy.

    parts: the segments whose tokens are there, one after the other.
    rows: the rows of the batch that read it.
    room: free tokens behind the parts, where a row's own tokens are written as they come.
    """

    parts: Path
    rows: tuple[int, ...]
    room: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the parts."""
        return sum(part.visible for part in self.parts)


class LayerSource(Protocol):
    """Packed KV [layer, K or V, entry, kv_head, token, head_dim], one layer at a time."""

    def layer(self, number: int) -> torch.Tensor:
        """[K or V, entry, kv_head, token, head_dim], to be read and written; it may wait."""
        ...

    def restore(self, tail: Tail) -> None:
        """Rows that have decoded before, one per entry, keep their tails, which follow the parts.

        What is there beyond a row's own tokens is masked.
        """
        ...


def pack(store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> torch.Tensor:
    """The parts of every entry, one after the other, with zeros up to `num_tokens` behind them.

    An entry reads a device copy of a segment of its own, where there are several.
    """
    layout = store.pool.layout
    data = store.pool.storage.new_zeros(
        (layout.num_layers, 2, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim)
    )
    passed: Counter[Segment] = Counter()
    for number, entry in enumerate(entries):
        at = 0
        for part in entry.parts:
            held = store.gather(part.segment, part.visible, copy=passed[part.segment])
            passed[part.segment] += 1
            data[:, :, number, :, at : at + part.visible] = held.transpose(2, 3)
            at += part.visible
    return data


class ResidentLayers:
    """A `LayerSource` with all layers on the device."""

    def __init__(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> None:
        self._data = pack(store, entries, num_tokens)
        self._layers = self._data.unbind(0)
        self._lengths = [entry.num_tokens for entry in entries]

    def layer(self, number: int) -> torch.Tensor:
        return self._layers[number]

    def restore(self, tail: Tail) -> None:
        for number, data in enumerate(self._data if tail.num_tokens else ()):
            for both, held in zip(data, tail.read(number), strict=True):
                for row, length in enumerate(self._lengths):
                    own = held[row, :, : tail.capacity]
                    both[row, :, length : length + own.shape[1]] = own


Hold = Callable[[SegmentStore, Sequence[Entry], int], LayerSource]
"""Packs entries of so many tokens each, see `pack`; decides where the layers reside."""
