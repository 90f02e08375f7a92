"""DeviceCopy: a packed copy whose layers really stand on two sides of a link (a GPU).

The counterpart of `offload.StreamedCopy` over a `kv.layered.LayeredStore`. At home a layer is one
flat run of tokens [token, 2, kv_head, head_dim], so that a stream buffer is filled by one large
copy; a kernel on the compute stream then spreads it over the padded layout that attention reads.
Resident layers stand in that layout already. Knows no order of layers, which is `streams`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from beamwright.attention.layers import Entry
from beamwright.attention.offload import NUM_BUFFERS, neighbours
from beamwright.kv import LayeredStore, Piece, Segment

if TYPE_CHECKING:
    from beamwright.attention.streams import LayerStreams


class DeviceCopy:
    """See the module. The working layout is [K or V, entry, kv_head, token, head_dim].

    grows: False, because the rows' own tokens cross the link once, with the tail.
    """

    grows = False

    def __init__(
        self,
        streams: LayerStreams,
        store: LayeredStore,
        entries: Sequence[Entry],
        num_tokens: int,
    ) -> None:
        self.entries, self.used = entries, list[int]()
        self.lengths = [entry.num_tokens for entry in entries]
        self._streams, self._store = streams, store
        layout, device = store.pool.layout, store.compute_device
        self._token = (2, layout.num_kv_heads, layout.head_dim)
        self._working_size = (2, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim)
        self.token_bytes = layout.bytes_per_token // layout.num_layers
        self.layer_bytes = len(entries) * num_tokens * self.token_bytes
        self._starts = [0, *accumulate(self.lengths)]
        self._entry = torch.repeat_interleave(torch.tensor(self.lengths)).to(device)
        self._at = torch.cat([torch.arange(length) for length in self.lengths]).to(device)
        self._runs: list[tuple[int, int]] = []
        self._near: dict[int, torch.Tensor] = {}
        self._far: dict[int, torch.Tensor] = {}
        self._landing: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._working: torch.Tensor | None = None
        self._own: torch.Tensor | None = None  # present rows' entries, and where their parts end

    # --- what attention reads ----------------------------------------------------------------

    def layer(self, number: int) -> torch.Tensor:
        """See `layers.LayerSource`. Spreads a streamed layer, which its buffer is free after."""
        slot = self._streams.slot_of(number)
        if slot is not None:
            if self._working is None:
                self._working = self._zeros(self._working_size)
            self._spread(self._working, self._buffers[slot], number)
            return self._working
        if number not in self._near:
            self._near[number] = self._resident(number)
        return self._near[number]

    def _resident(self, number: int) -> torch.Tensor:
        """A layer that is on the device: where it just landed, or as its segments hold it."""
        flat = self._landing.pop(number, None)
        if flat is None:
            parts = [part for entry in self.entries for part in entry.parts]
            held = [self._store.near(part.segment, part.visible, number) for part in parts]
            flat = torch.cat(held) if held else self._zeros((0, *self._token))
        else:
            self._add_to_segments(flat, number)
        return self._spread(self._zeros(self._working_size), flat, number)

    def _add_to_segments(self, flat: torch.Tensor, number: int) -> None:
        at = 0
        for part in (part for entry in self.entries for part in entry.parts):
            whole = part.visible == part.segment.length
            if whole and self._store.near_layers(part.segment) == number:
                self._store.add_layer(part.segment, flat[at : at + part.visible])
            at += part.visible

    def _spread(self, working: torch.Tensor, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Flat tokens to their places, and the rows' own behind them where there is room."""
        # Indices that a slice parts come first: [tokens, 2, kv_heads, head_dim].
        working[:, self._entry, :, self._at] = flat
        tail = self._streams.tail
        if tail is not None and tail.length and any(entry.room for entry in self.entries):
            own = tail.own_tokens(number)
            if self._own is None:
                real = self._streams.rows[: own.shape[1]]
                places = [real, [self.lengths[row] for row in real]]
                self._own = torch.tensor(places, device=flat.device)
            rows, ends = self._own
            at = ends + torch.arange(len(own), device=flat.device).unsqueeze(1)
            working[:, rows.expand_as(at), :, at] = own
        return working

    # --- what crosses the link ---------------------------------------------------------------

    def open_buffers(self) -> None:
        """Allocate the two stream buffers."""
        if not self._buffers:
            size = (self._starts[-1], *self._token)
            self._buffers = [self._zeros(size) for _ in range(NUM_BUFFERS)]

    def choose(self, rows: set[int]) -> int:
        """See `offload.StreamedCopy`."""
        self._own = None
        self.used = [
            number for number, entry in enumerate(self.entries) if not rows.isdisjoint(entry.rows)
        ]
        runs = neighbours(self.used, lambda a, b: True)
        self._runs = [(self._starts[run[0]], self._starts[run[-1] + 1]) for run in runs]
        return sum(self.lengths[number] for number in self.used)

    def sealed_pieces(self, layer: int, slot: int) -> list[Piece]:
        """The parts that present rows read: one piece per run of neighbouring entries."""
        return self._pieces(self._buffers[slot], layer)

    def grown_pieces(self, layer: int, slot: int, num_tokens: int) -> list[Piece]:
        """None: see `grows`."""
        del layer, slot, num_tokens
        return []

    def landing_pieces(self, layer: int) -> list[Piece]:
        """The parts of a layer that becomes resident."""
        self._landing[layer] = self._zeros((self._starts[-1], *self._token))
        return self._pieces(self._landing[layer], layer)

    def home_pieces(
        self, number: int, at: int, segment: Segment, visible: int, layer: int
    ) -> Iterator[Piece]:
        """What brings a layer of a segment home, which the store holds whole."""
        del number, at
        self._streams.leaving[segment] = None
        yield from self._store.leave(segment, visible, layer)

    def kept_pieces(self, resident: int) -> Iterator[tuple[int, Piece]]:
        """(layer, piece) of what the record takes to be at home, and the store knows is not.

        The record knows a tail's tokens by their latest rows. A row that was sealed and dropped
        before its layers left has taken its tokens to its segment.
        """
        parts = [part for number in self.used for part in self.entries[number].parts]
        for segment in dict.fromkeys(part.segment for part in parts):
            if segment in self._streams.leaving or self._store.near_layers(segment) <= resident:
                continue
            self._streams.leaving[segment] = None
            for layer in range(resident, self._store.home_from(segment)):
                for piece in self._store.leave(segment, segment.length, layer):
                    yield layer, piece

    def left(self, resident: int) -> None:
        """Layers from `resident` on have been sent home: the device forgets them."""
        self._near = {layer: held for layer, held in self._near.items() if layer < resident}
        for segment in self._streams.leaving:
            self._store.drop_layers(segment, resident)

    def _pieces(self, destination: torch.Tensor, layer: int) -> list[Piece]:
        source = self._at_home(layer)
        return [
            Piece(destination[first:end], source[first:end], (end - first) * self.token_bytes)
            for first, end in self._runs
            if end > first
        ]

    def _at_home(self, layer: int) -> torch.Tensor:
        """The parts of a layer on the host, packed when they are first streamed."""
        if layer not in self._far:
            home = self._store.home_memory((self._starts[-1], *self._token))
            at = 0
            for part in (part for entry in self.entries for part in entry.parts):
                home[at : at + part.visible] = self._store.far(part.segment, part.visible, layer)
                at += part.visible
            self._far[layer] = home
        return self._far[layer]

    def _zeros(self, size: tuple[int, ...]) -> torch.Tensor:
        """Device memory. Zeros: masked positions must never hold NaN bits."""
        layout = self._store.pool.layout
        return torch.zeros(size, dtype=layout.dtype, device=self._store.compute_device)
