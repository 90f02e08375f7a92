"""The tail of rows whose layers really stand on two sides of a link (a GPU).

The counterpart of `streamed_tail.StreamedTail` over a `kv.layered_tail.LayeredTail`: a token of a
streamed layer is written into the layer's stream buffer, and goes home by one copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from beamwright.attention.home_record import HomeRecord
from beamwright.attention.offload import NUM_BUFFERS
from beamwright.kv import LayeredTail, Piece

if TYPE_CHECKING:
    from beamwright.attention.streams import LayerStreams


class DeviceTail:
    """See the module; what it offers is what `StreamedTail` does."""

    def __init__(self, tail: LayeredTail, streams: LayerStreams) -> None:
        self._tail, self._streams = tail, streams
        self.capacity = tail.capacity
        self._buffers: list[torch.Tensor] = []
        self._at_home = HomeRecord(tail.length, streams.resident_before)

    @property
    def length(self) -> int:
        """See `TailBuffer`."""
        return self._tail.length

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, room for further tokens included."""
        tail = self._tail
        return tail.held_tokens * tail.num_rows * self._streams.token_bytes

    def open_buffers(self) -> None:
        """Two buffers of the tail's present size."""
        tail = self._tail
        if not self._buffers or self._buffers[0].shape[:2] != (tail.held_tokens, tail.num_real):
            device = self._streams.device
            self._buffers = [tail.fresh(device) for _ in range(NUM_BUFFERS)]

    def count_rows(self, num_real: int) -> None:
        """Only so many rows have KV of their own."""
        self._tail.count_rows(num_real)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """See `TailBuffer`. In a streamed layer the token goes home over the link."""
        tail, streams, step = self._tail, self._streams, self.length
        if layer == 0:
            self._at_home.begin(step, streams.resident)
            tail.resident = streams.resident
        own = key_value[: tail.num_real].contiguous()
        slot = streams.slot_of(layer)
        if slot is None:
            tail.near(layer)[step] = own
            return
        self._buffers[slot][step] = own
        num_bytes = tail.num_real * streams.token_bytes
        tail.goes_home(streams.store([Piece(tail.far(layer)[step], own, num_bytes)]))

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TailBuffer`. Rows that pad the batch read the first one's tokens."""
        held = self._standing(layer)[: self.length + 1]
        padding = self._tail.num_rows - self._tail.num_real
        if padding:
            held = torch.cat([held, held[:, :1].expand(-1, padding, -1, -1, -1)], dim=1)
        both = held.permute(2, 1, 3, 0, 4)
        return both[0], both[1]

    def own_tokens(self, layer: int) -> torch.Tensor:
        """Device tokens [tokens, real rows, 2, kv_heads, head_dim] before the present one."""
        return self._standing(layer)[: self.length]

    def pieces(self, layer: int, slot: int) -> list[Piece]:
        """The tokens so far of the real rows, into a buffer."""
        return self._pieces(self._buffers[slot], self._tail.far(layer), 0)

    def landing_pieces(self, layer: int) -> list[Piece]:
        """The same for a layer that becomes resident."""
        return self._pieces(self._tail.near(layer), self._tail.far(layer), 0)

    @property
    def home_from(self) -> int:
        """The first layer from which all tokens so far are at home."""
        return self._at_home.layer

    def write_home(self, resident: int) -> Iterator[tuple[int, Piece]]:
        """(layer, piece) of tokens that are not at home in layers that are not resident."""
        for layer, first in self._at_home.missing(resident):
            for piece in self._pieces(self._tail.far(layer), self._tail.near(layer), first):
                self._tail.left = True
                yield layer, piece

    def left(self, resident: int) -> None:
        """Layers from `resident` on have been sent home: the device forgets them."""
        if resident < self._tail.resident:
            self._tail.resident = resident
            self._tail.drop_near()

    def _standing(self, layer: int) -> torch.Tensor:
        slot = self._streams.slot_of(layer)
        return self._tail.near(layer) if slot is None else self._buffers[slot]

    def _pieces(self, destination: torch.Tensor, source: torch.Tensor, first: int) -> list[Piece]:
        num_tokens = (self.length - first) * self._tail.num_real
        if not num_tokens:
            return []
        tokens = slice(first, self.length)
        num_bytes = num_tokens * self._streams.token_bytes
        return [Piece(destination[tokens], source[tokens], num_bytes)]
