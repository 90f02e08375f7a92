"""PackedLayers: a packed copy whose layers reside on two sides of a link.

Attention reads a padded layout [K or V, entry, kv_head, token, head_dim]. A link that takes strided
pieces (a copier of the CPU) moves the tokens of that layout from the host into a stream buffer. For
a card a layer is one flat run of tokens [token, 2, kv_head, head_dim] on the host and in the
buffers, so that one large copy fills a buffer; then compute spreads it. Resident layers are in the
padded layout. Knows no order of layers, which is `streams`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from beamwright.attention.layers import Entry
from beamwright.kv.segments import Path, PathPart
from beamwright.kv.streams import Piece
from beamwright.kv.tails import Tail
from beamwright.layerwise.placement import NUM_BUFFERS, Placement, neighbours
from beamwright.layerwise.store import LayeredStore
from beamwright.layerwise.tail import LayeredTail


class PackedLayers:
    """A `LayerSource` over a link.

    tail: holds the rows' own tokens, which cross the link once, with it; None where there are none.
    layer_bytes: of one layer in the padded layout. parts: of all entries, in their order.
    """

    def __init__(
        self,
        placement: Placement,
        tail: LayeredTail | None,
        store: LayeredStore,
        entries: Sequence[Entry],
        num_tokens: int,
    ) -> None:
        self._placement, self._tail, self._store = placement, tail, store
        self._strided = store.link.strided
        self._entries, self._used = entries, list[int]()
        self._lengths = [entry.num_tokens for entry in entries]
        self._grows = any(entry.room for entry in entries)
        self.parts: Path = tuple(part for entry in entries for part in entry.parts)
        layout, device = store.pool.layout, store.compute_device
        self._token = (2, layout.num_kv_heads, layout.head_dim)
        self._padded = (2, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim)
        self._token_bytes = layout.bytes_per_token // layout.num_layers
        self.layer_bytes = len(entries) * num_tokens * self._token_bytes
        self._starts = [0, *accumulate(self._lengths)]
        self._entry = torch.repeat_interleave(torch.tensor(self._lengths)).to(device)
        self._at = torch.cat([torch.arange(length) for length in self._lengths]).to(device)
        self._slices: list[tuple[tuple[slice, ...], int]] = []  # what is moved, and its tokens
        self._fetched: dict[tuple[int, int], list[Piece]] = {}
        self._on_device: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, torch.Tensor] = {}
        self._landing: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._working: torch.Tensor | None = None
        # Where the present rows' own tokens are: entry and place [token, row].
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None

    # --- what attention reads ----------------------------------------------------------------

    def layer(self, number: int) -> torch.Tensor:
        """A flat buffer is free again after it."""
        buffer = self._placement.buffer_of(number)
        if buffer is None:
            if number not in self._on_device:
                self._on_device[number] = self._resident(number)
            return self._on_device[number]
        held = self._buffers[buffer]
        if not self._strided:
            if self._working is None:
                self._working = self._zeros(self._padded)
            held = self._spread(self._working, held)
        return self._add_own(held, number)

    def restore(self, tail: Tail) -> None:
        """Every layer that it gives out has the tail's tokens."""

    def _resident(self, number: int) -> torch.Tensor:
        """A layer that is on the device: where it just landed, or as its segments hold it."""
        landed = self._landing.pop(number, None)
        if landed is None:
            stored = self._store.device_layer
            held = [stored(part.segment, part.visible, number) for part in self.parts]
            flat = torch.cat(held) if held else self._zeros((0, *self._token))
        else:
            flat = landed[:, self._entry, :, self._at] if self._strided else landed
            self._settle(flat, number)
        return self._add_own(self._spread(self._zeros(self._padded), flat), number)

    def _settle(self, flat: torch.Tensor, number: int) -> None:
        """Parts that present rows read have landed, and their segments have the layer now.

        Segments that nobody read while the layer was streamed may still have it, and the host not.
        """
        for entry in self._used:
            at = self._starts[entry]
            for part in self._entries[entry].parts:
                landed = flat[at : at + part.visible]
                num_layers = self._store.device_layers(part.segment)
                if num_layers > number:
                    landed.copy_(self._store.device_layer(part.segment, part.visible, number))
                elif num_layers == number and part.visible == part.segment.length:
                    self._store.add_layer(part.segment, landed)
                at += part.visible

    def _spread(self, padded: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Flat tokens to their places."""
        # Indices that a slice parts come first: [tokens, 2, kv_heads, head_dim].
        padded[:, self._entry, :, self._at] = flat
        return padded

    def _add_own(self, padded: torch.Tensor, number: int) -> torch.Tensor:
        """The rows' own tokens behind their entries, where there is room."""
        if not self._grows or self._tail is None or not self._tail.length:
            return padded
        own = self._tail.own_tokens(number)
        if self._own is None or self._own[0].shape != own.shape[:2]:
            real = self._placement.rows[: own.shape[1]]
            ends = torch.tensor([self._lengths[row] for row in real], device=own.device)
            at = ends + torch.arange(len(own), device=own.device).unsqueeze(1)
            self._own = torch.tensor(real, device=own.device).expand_as(at), at
        rows, at = self._own
        padded[:, rows, :, at] = own
        return padded

    # --- what crosses the link ---------------------------------------------------------------

    def open_buffers(self) -> None:
        """Allocate the two stream buffers."""
        if not self._buffers:
            self._buffers = [self._zeros(self._moved_size) for _ in range(NUM_BUFFERS)]

    def choose(self, rows: set[int]) -> int:
        """From here on move only what these rows read; returns the tokens that are there."""
        self._own = None
        self._used = [
            number for number, entry in enumerate(self._entries) if not rows.isdisjoint(entry.rows)
        ]
        self._fetched.clear()
        self._slices = [*(self._padded_slices() if self._strided else self._flat_slices())]
        return sum(num_tokens for _, num_tokens in self._slices)

    def _flat_slices(self) -> Iterator[tuple[tuple[slice, ...], int]]:
        """One per run of entries that lie next to each other."""
        for run in neighbours(self._used):
            first, end = self._starts[run.start], self._starts[run.stop]
            yield (slice(first, end),), end - first

    def _padded_slices(self) -> Iterator[tuple[tuple[slice, ...], int]]:
        """One per run of entries that are equally long, too."""
        lengths, whole = self._lengths, slice(None)
        for run in neighbours(self._used, lambda a, b: lengths[a] == lengths[b]):
            length = lengths[run.start]
            yield (whole, slice(run.start, run.stop), whole, slice(length)), len(run) * length

    @property
    def used_parts(self) -> Iterator[PathPart]:
        """The parts that present rows read."""
        return (part for number in self._used for part in self._entries[number].parts)

    def fetched_pieces(self, layer: int, buffer: int) -> list[Piece]:
        """The parts that present rows read, into a stream buffer.

        They cannot change while the view lives and its rows stay.
        """
        if (layer, buffer) not in self._fetched:
            self._on_host[layer] = self._host_copy(layer)
            self._fetched[layer, buffer] = self._pieces(self._buffers[buffer], self._on_host[layer])
        return self._fetched[layer, buffer]

    def landing_pieces(self, layer: int) -> list[Piece]:
        """The same parts of a layer that becomes resident, into memory of their own."""
        self._landing[layer] = self._zeros(self._moved_size)
        return self._pieces(self._landing[layer], self._host_copy(layer))

    def drop_layers(self, resident: int) -> None:
        """Layers from `resident` on have been written back: the device forgets them."""
        self._on_device = {n: held for n, held in self._on_device.items() if n < resident}

    def _pieces(self, destination: torch.Tensor, source: torch.Tensor) -> list[Piece]:
        return [
            Piece(destination[at], source[at], num_tokens * self._token_bytes)
            for at, num_tokens in self._slices
            if num_tokens
        ]

    def _host_copy(self, layer: int) -> torch.Tensor:
        """The parts of a layer on the host, packed once for all fetches."""
        if layer in self._on_host:
            return self._on_host[layer]
        flat = self._store.host_memory((self._starts[-1], *self._token))
        at = 0
        for part in self.parts:
            flat[at : at + part.visible] = self._store.host_layer(part.segment, part.visible, layer)
            at += part.visible
        return self._spread(flat.new_zeros(self._padded), flat) if self._strided else flat

    @property
    def _moved_size(self) -> tuple[int, ...]:
        return self._padded if self._strided else (self._starts[-1], *self._token)

    def _zeros(self, size: tuple[int, ...]) -> torch.Tensor:
        """Device memory. Zeros: masked positions must never hold NaN bits."""
        layout = self._store.pool.layout
        return torch.zeros(size, dtype=layout.dtype, device=self._store.compute_device)
