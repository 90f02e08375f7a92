"""The tail of rows whose layers are streamed. Knows no attention operator (see `streams`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from beamwright.attention.home_record import HomeRecord
from beamwright.attention.offload import NUM_BUFFERS, Array, StreamedCopy, as_array, neighbours
from beamwright.attention.streams import LayerStreams
from beamwright.kv import Piece, TailBuffer


class StreamedTail:
    """Stands in for a `TailBuffer`: streamed layers are written and read in two device buffers.

    Where the packed copies hold the rows' own tokens too, nobody reads the tail, and it does not
    cross the link a second time.
    """

    def __init__(self, tail: TailBuffer, streams: LayerStreams) -> None:
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
        """Bytes of one layer, padding included."""
        return self._tail.storage[0].nbytes

    def open_buffers(self) -> None:
        """Two buffers of the tail's present shape."""
        like = self._tail.storage[0]
        if not self._buffers or self._buffers[0].shape != like.shape:
            self._buffers = [torch.zeros_like(like) for _ in range(NUM_BUFFERS)]

    def count_rows(self, num_real: int) -> None:
        """What padding rows hold stays where it is."""

    def left(self, resident: int) -> None:
        """Both tiers are one memory: nothing to forget."""

    def own_tokens(self, layer: int) -> torch.Tensor:
        """Nobody asks: packed copies that hold a row's own tokens get them as they come."""
        raise AssertionError(f"layer {layer} holds its own tokens already")

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """See `TailBuffer`. In a streamed layer the token goes home over the link."""
        streams, step = self._streams, self.length
        if layer == 0:
            self._at_home.begin(step, streams.resident)
        slot = streams.slot_of(layer)
        if slot is None:
            self._tail.write(layer, key_value)
            return
        home = self._home(layer)
        fresh = as_array(key_value).swapaxes(0, 1)
        # Padding rows go along uncounted: what they hold is never sealed.
        pieces = [Piece(home[:, :, :, step], fresh, streams.num_real * streams.token_bytes)]
        if streams.grows:
            pieces += self._pieces_at_home(layer, home)
        else:
            self._buffers[slot][:, :, :, step] = key_value.transpose(0, 1)
        streams.store(pieces)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TailBuffer`."""
        slot = self._streams.slot_of(layer)
        if slot is None:
            return self._tail.read(layer)
        held = self._buffers[slot][..., : self.length + 1, :]
        return held[0], held[1]

    def pieces(self, layer: int, slot: int) -> list[Piece]:
        """The tokens so far of the real rows, into a buffer."""
        return self._pieces(self._home(layer), as_array(self._buffers[slot]), 0)

    def landing_pieces(self, layer: int) -> list[Piece]:
        """The same for a layer that becomes resident."""
        home = self._home(layer)
        return self._pieces(home, np.empty_like(home), 0)

    @property
    def home_from(self) -> int:
        """The first layer from which all tokens so far are at home."""
        return self._at_home.layer

    def write_home(self, resident: int) -> Iterator[tuple[int, Piece]]:
        """(layer, piece) of tokens that are not at home in layers that are not resident."""
        for layer, first in self._at_home.missing(resident):
            home = self._home(layer)
            for piece in self._pieces(home, np.empty_like(home), first):
                yield layer, piece

    def _home(self, layer: int) -> Array:
        return as_array(self._tail.storage[layer])

    def _pieces(self, source: Array, destination: Array, first: int) -> list[Piece]:
        real, tokens = slice(self._streams.num_real), slice(first, self.length)
        num_bytes = self._streams.num_real * (self.length - first) * self._streams.token_bytes
        if not num_bytes:
            return []
        return [Piece(destination[:, real, :, tokens], source[:, real, :, tokens], num_bytes)]

    def _pieces_at_home(self, layer: int, home: Array) -> list[Piece]:
        """From the tail into the packed copy: host work behind the link, no bytes of its own."""
        rows, (copy,) = self._streams.rows, self._streams.copies
        assert isinstance(copy, StreamedCopy)
        found = []
        for run in neighbours(
            range(self._streams.num_real),
            lambda a, b: rows[a] + 1 == rows[b] and copy.lengths[rows[a]] == copy.lengths[rows[b]],
        ):
            entries, at = slice(rows[run[0]], rows[run[-1]] + 1), copy.lengths[rows[run[0]]]
            source = home[:, run[0] : run[-1] + 1, :, self.length]
            found.append(Piece(copy.host[layer][:, entries, :, at + self.length], source, 0))
        return found
