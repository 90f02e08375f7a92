"""Streams layers of KV through two device buffers for every token: layer-wise offloading.

For each token it decides which layers are resident and when the others cross the link (LBS section
4.1, Eq. 1-2). It is independent of the attention operator.

Attention reads a padded layout, [K or V, entry, kv_head, token, head_dim]; an entry is KV that one
or more rows read. The CPU's copier moves strided pieces, from the host straight into that layout.
For a GPU, a layer is one flat run of tokens [token, 2, kv_head, head_dim] on the host and in a
buffer: one large copy fills the buffer, and compute spreads it to the padded layout afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import torch

from beamwright.attention.buckets import Entry, LayerSource
from beamwright.errors import LinkError, format_bytes
from beamwright.kv.link import Transfer
from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from beamwright_lab.baselines.layerwise.store import LayeredStore
from beamwright_lab.baselines.layerwise.tail import NUM_BUFFERS, LayeredTail, Placement


class PackedLayers(LayerSource):
    """The layers that one attention call reads: resident, or streamed over a link.

    tail: holds the rows' own tokens, which it moves itself. parts: the parts of all entries, in
    their order.
    """

    def __init__(
        self,
        placement: Placement,
        tail: LayeredTail,
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
        self._starts = [0, *accumulate(self._lengths)]
        self._flat = (self._starts[-1], 2, layout.num_kv_heads, layout.head_dim)
        self._padded = (2, len(entries), layout.num_kv_heads, num_tokens, layout.head_dim)
        self._moved = self._padded if self._strided else self._flat  # shape of a stream buffer
        self._entry = torch.repeat_interleave(torch.tensor(self._lengths)).to(device)
        self._at = torch.cat([torch.arange(length) for length in self._lengths]).to(device)
        self._slices: list[tuple[tuple[slice, ...], int]] = []  # slices to move, and their tokens
        self._fetched: dict[tuple[int, int], list[Piece]] = {}
        self._on_device: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, torch.Tensor] = {}
        self._landing: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._working: torch.Tensor | None = None
        # Where the current rows' own tokens go: entry and position, each [token, row].
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None

    # --- what attention reads ----------------------------------------------------------------

    def layer(self, number: int) -> torch.Tensor:
        """Return a layer in the padded layout. A flat stream buffer may be refilled afterwards."""
        if number < self._placement.resident:
            if number not in self._on_device:
                self._on_device[number] = self._resident(number)
            return self._on_device[number]
        held = self._buffers[self._placement.buffers[number]]
        if not self._strided:
            if self._working is None:
                self._working = self._zeros(self._padded)
            held = self._spread(self._working, held)
        return self._add_own(held, number)

    def _resident(self, number: int) -> torch.Tensor:
        """Return a resident layer: as it has just been loaded, or as its segments hold it."""
        landed = self._landing.pop(number, None)
        if landed is None:
            stored = self._store.device_layer
            held = [stored(part.segment, part.visible, number) for part in self.parts]
            flat = torch.cat(held) if held else self._zeros(self._flat)
        else:
            flat = landed[:, self._entry, :, self._at] if self._strided else landed
            self._settle(flat, number)
        return self._add_own(self._spread(self._zeros(self._padded), flat), number)

    def _settle(self, flat: torch.Tensor, number: int) -> None:
        """Give the segments that current rows read a layer that has just become resident.

        A segment that no row read while the layer was streamed may still have it on the device,
        and not on the host; then the device's tokens replace what was loaded.
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
        """Write flat tokens to their positions in a padded layer, and return it."""
        # Index tensors that a slice separates come first: [tokens, 2, kv_heads, head_dim].
        padded[:, self._entry, :, self._at] = flat
        return padded

    def _add_own(self, padded: torch.Tensor, number: int) -> torch.Tensor:
        """Write the rows' own tokens after their entries, if the layout has room for them."""
        if not self._grows or not self._tail.length:
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

    # --- transfers over the link -------------------------------------------------------------

    def open_buffers(self) -> None:
        """Allocate the two stream buffers."""
        if not self._buffers:
            self._buffers = [self._zeros(self._moved) for _ in range(NUM_BUFFERS)]

    def choose(self, rows: set[int]) -> int:
        """Move only what these rows read from now on. Return the number of those tokens."""
        self._own = None
        self._used = [
            number for number, entry in enumerate(self._entries) if not rows.isdisjoint(entry.rows)
        ]
        self._fetched.clear()
        self._slices, runs = [], list[range]()
        for number in self._used:  # join neighbours; in the padded layout only equally long ones
            alike = not self._strided or self._lengths[number - 1] == self._lengths[number]
            if runs and runs[-1].stop == number and alike:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        for run in runs:
            first, end = self._starts[run.start], self._starts[run.stop]
            at: tuple[slice, ...] = (slice(first, end),)
            if self._strided:
                whole, tokens = slice(None), slice(self._lengths[run.start])
                at = (whole, slice(run.start, run.stop), whole, tokens)
            self._slices.append((at, end - first))
        return sum(num_tokens for _, num_tokens in self._slices)

    @property
    def used_parts(self) -> Iterator[PathPart]:
        """Yield the parts that current rows read."""
        return (part for number in self._used for part in self._entries[number].parts)

    def fetched_pieces(self, layer: int, buffer: int) -> list[Piece]:
        """Return the pieces that load a layer of the parts in use into a stream buffer.

        They stay the same while the view is open and its rows do not change.
        """
        if (layer, buffer) not in self._fetched:
            self._on_host[layer] = self._host_copy(layer)
            self._fetched[layer, buffer] = self._pieces(self._buffers[buffer], self._on_host[layer])
        return self._fetched[layer, buffer]

    def landing_pieces(self, layer: int) -> list[Piece]:
        """Return the pieces that load a layer that becomes resident into memory of its own."""
        self._landing[layer] = self._zeros(self._moved)
        return self._pieces(self._landing[layer], self._host_copy(layer))

    def drop_layers(self, resident: int) -> None:
        """Free the layers from `resident` on, which have been written back."""
        self._on_device = {n: held for n, held in self._on_device.items() if n < resident}

    def _pieces(self, destination: torch.Tensor, source: torch.Tensor) -> list[Piece]:
        return [
            Piece(destination[at], source[at], num_tokens * self._store.token_bytes)
            for at, num_tokens in self._slices
            if num_tokens
        ]

    def _host_copy(self, layer: int) -> torch.Tensor:
        """Return a layer's parts on the host, packed once for all fetches."""
        if layer in self._on_host:
            return self._on_host[layer]
        flat = self._store.host_memory(self._flat)
        at = 0
        for part in self.parts:
            flat[at : at + part.visible] = self._store.host_layer(part.segment, part.visible, layer)
            at += part.visible
        return self._spread(flat.new_zeros(self._padded), flat) if self._strided else flat

    def _zeros(self, size: tuple[int, ...]) -> torch.Tensor:
        """Allocate device memory. Zeros, because masked positions must never hold NaN."""
        dtype, device = self._store.pool.layout.dtype, self._store.compute_device
        return torch.zeros(size, dtype=dtype, device=device)


def resident_layers(num_layers: int, budget_bytes: int, layer_bytes: int) -> int:
    """Return how many layers can stay on the device (Eq. 1, minus two stream buffers)."""
    if num_layers * layer_bytes <= budget_bytes:
        return num_layers
    return max(0, budget_bytes // layer_bytes - NUM_BUFFERS)


class LayerStreams:
    """Mover of one view's layers. Per token call `begin`, then per layer `ready` and `done`."""

    def __init__(self, store: LayeredStore, num_rows: int, tail: LayeredTail | None = None) -> None:
        self.num_layers = store.pool.layout.num_layers
        self.placement = Placement(self.num_layers, list(range(num_rows)), num_rows)
        self._store, self._tail = store, tail or LayeredTail(store, 0)
        self._copies: list[PackedLayers] = []
        self._sealed_tokens: int | None = None
        self._fetching: dict[int, list[Transfer]] = {}
        self._leaving: dict[int, Transfer] = {}
        self._ahead: Transfer | None = None
        self._charged = 0
        self._begun = False
        self._tail.open(self.placement)

    def hold(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> LayerSource:
        assert store is self._store
        copy = PackedLayers(self.placement, self._tail, self._store, entries, num_tokens)
        self._copies.append(copy)
        return copy

    def use_rows(self, rows: list[int], num_real: int) -> None:
        """Continue with these rows; only the first `num_real` are streamed and counted."""
        self._discard_ahead()
        self.placement.rows, self.placement.num_real = rows, num_real
        self._sealed_tokens = None
        self._tail.set_num_rows(num_real)

    def held_bytes(self) -> int:
        """Return the bytes of the real rows' KV in one layer, without the tokens being computed."""
        placement = self.placement
        if self._sealed_tokens is None:
            real = set(placement.rows[: placement.num_real])
            self._sealed_tokens = sum(copy.choose(real) for copy in self._copies)
        own = self._tail.length * placement.num_real
        return (self._sealed_tokens + own) * self._store.token_bytes

    # --- one token ---------------------------------------------------------------------------

    def begin(self, num_new: int, max_layers: int) -> None:
        """Decide how many layers are resident (Eq. 1, up to `max_layers`); start to fetch others.

        num_new: tokens that are being computed.

        Raises:
            CapacityError: if not even two stream buffers fit.
        """
        store = self._store
        budget, layer_bytes = store.device_budget, self.held_bytes() + num_new * store.token_bytes
        self._release()
        resident = min(max_layers, resident_layers(self.num_layers, budget.free_bytes, layer_bytes))
        if resident != self.placement.resident:
            self._discard_ahead()
        num_held = resident if resident == self.num_layers else resident + NUM_BUFFERS
        budget.charge(
            num_held * layer_bytes,
            f"{num_held} layers of {format_bytes(layer_bytes)} "
            f"({NUM_BUFFERS} of them stream buffers)",
        )
        self._charged = num_held * layer_bytes
        before = store.resident
        self.placement.resident = store.resident = resident
        if not self._begun or resident < before:
            self._write_back(resident)
        if not self._begun:  # segments that no row has read may lack layers that became resident
            parts = [part for copy in self._copies for part in copy.parts]
            segments = dict.fromkeys(part.segment for part in parts)
            store.order(store.bring(segments, min(before, resident)))
        self._begun = True
        for layer in range(before, resident):
            pieces = [piece for copy in self._copies for piece in copy.landing_pieces(layer)]
            pieces += self._tail.fetched_pieces(layer)
            self._fetching[layer] = [self._submit(Direction.H2D, pieces)]
        if resident < self.num_layers:
            for copy in self._copies:
                copy.open_buffers()
            self._tail.open_buffers()
            self._fetch_first()

    def ready(self, layer: int) -> None:
        """Let compute wait until a layer's KV is on the device."""
        self._store.order(self._fetching.get(layer, []))
        self._fetching.pop(layer, None)

    def done(self, layer: int) -> None:
        """Fetch the layer after the next into the buffer of a layer that has been read.

        After the last layers, fetch the next token's first streamed layer ahead, without the tail,
        if there can be a next token and the same layers stay resident.
        """
        placement = self.placement
        if layer < placement.resident:
            return
        following, buffer = layer + NUM_BUFFERS, placement.buffers[layer]
        if following < self.num_layers:
            self._fetch(following, buffer)
        elif following == self.num_layers and self._tail.length + 1 < self._tail.capacity:
            layer_bytes = self.held_bytes() + 2 * placement.num_real * self._store.token_bytes
            free = self._store.device_budget.free_bytes + self._charged
            if resident_layers(self.num_layers, free, layer_bytes) == placement.resident:
                self._ahead = self._submit(Direction.H2D, self._sealed(placement.resident, buffer))
                placement.buffers[placement.resident] = buffer
        if layer == self.num_layers - 1:
            # The next token's fetches read what this one has stored.
            self._store.order(placement.storing)
            placement.storing.clear()

    def close(self) -> None:
        """Release the budget, and let all transfers end, so that equal runs move equal bytes."""
        self._release()
        fetching = [transfer for transfers in self._fetching.values() for transfer in transfers]
        pending, leaving = [*self.placement.storing, *fetching], [*self._leaving.values()]
        self._leaving, self._fetching = {}, {}
        self.placement.storing.clear()
        with suppress(LinkError):  # the call that needed the bytes has raised it
            self._store.wait(leaving)  # the next view reads them on the host
            self._store.order(pending)
            self._discard_ahead()

    def _write_back(self, resident: int) -> None:
        """Store the layers that are no longer resident; a segment with several copies goes once."""
        leaving: dict[Segment, int] = {}
        for part in (part for copy in self._copies for part in copy.used_parts):
            if self._store.device_layers(part.segment) > resident:
                leaving[part.segment] = max(part.visible, leaving.get(part.segment, 0))
        by_layer = defaultdict[int, list[Piece]](list)
        for segment, visible in leaving.items():
            for layer in range(resident, self._store.host_from(segment)):
                by_layer[layer] += self._store.leave(segment, visible, layer)
        for layer, pieces in self._tail.leaving_pieces(resident):
            by_layer[layer] += pieces
        for layer, pieces in sorted(by_layer.items()):
            self._leaving[layer] = self._submit(Direction.D2H, pieces)
        for segment in leaving:
            self._store.drop_layers(segment, resident)
        for copy in self._copies:
            copy.drop_layers(resident)
        self._tail.drop_layers(resident)

    def _fetch_first(self) -> None:
        first, buffer = self.placement.resident, 0
        if self._ahead is not None:
            buffer = self.placement.buffers[first]
            rest = self._submit(Direction.H2D, self._tail.fetched_pieces(first, buffer))
            self._fetching[first] = [self._ahead, rest]
            self._ahead = None
        else:
            self._fetch(first, buffer)
        if first + 1 < self.num_layers:
            self._fetch(first + 1, 1 - buffer)

    def _fetch(self, layer: int, buffer: int) -> None:
        leaving = self._leaving.pop(layer, None)
        if leaving is not None:  # it can only be fetched once the host has it
            self._store.wait([leaving])
        pieces = [*self._sealed(layer, buffer), *self._tail.fetched_pieces(layer, buffer)]
        self._fetching[layer] = [self._submit(Direction.H2D, pieces)]
        self.placement.buffers[layer] = buffer

    def _sealed(self, layer: int, buffer: int) -> list[Piece]:
        return [piece for copy in self._copies for piece in copy.fetched_pieces(layer, buffer)]

    def _submit(self, direction: Direction, pieces: Sequence[Piece]) -> Transfer:
        kind = "stream" if direction is Direction.H2D else "store"
        return self._store.link.submit(direction, kind, pieces)

    def _discard_ahead(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._store.discarded_bytes += ahead.num_bytes
            self._store.order([ahead])

    def _release(self) -> None:
        self._store.device_budget.release(self._charged)
        self._charged = 0
