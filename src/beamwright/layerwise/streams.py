"""Layers of packed KV that pass through two device buffers, token by token.

The mechanism of `layerwise` (LBS section 4.1, Eq. 1-2): which layers are resident for a token, what
crosses the link and when. Knows no attention operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from beamwright.attention.layers import Entry, LayerSource
from beamwright.errors import LinkError, format_bytes
from beamwright.kv.link import Transfer
from beamwright.kv.segments import Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import Piece
from beamwright.layerwise.packed import PackedLayers
from beamwright.layerwise.placement import NUM_BUFFERS, Placement, resident_layers
from beamwright.layerwise.store import LayeredStore
from beamwright.layerwise.tail import LayeredTail
from beamwright.protocols import Direction


class LayerStreams:
    """The layers of one view, token by token: `begin`, then per layer `ready` and `done`."""

    def __init__(self, store: LayeredStore, num_rows: int, tail: LayeredTail | None = None) -> None:
        layout = store.pool.layout
        self.num_layers = layout.num_layers
        self.token_bytes = layout.bytes_per_token // layout.num_layers
        self.placement = Placement(layout.num_layers, list(range(num_rows)), num_rows)
        self._store, self._offload, self._tail = store, store.offload, tail
        self._copies: list[PackedLayers] = []
        self._sealed_tokens: int | None = None
        self._fetching: dict[int, list[Transfer]] = {}
        self._storing: list[Transfer] = []
        self._leaving: dict[int, Transfer] = {}
        self._ahead: Transfer | None = None
        self._charged = self._padding = 0
        self._begun = False
        if tail is not None:
            tail.open(self.placement, self.store)

    def hold(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> LayerSource:
        assert store is self._store
        copy = PackedLayers(self.placement, self._tail, self._store, entries, num_tokens)
        self._copies.append(copy)
        return copy

    @property
    def resident_before(self) -> int:
        """Layers that stayed on the device when the view before ended."""
        before = self._offload.resident
        return self.num_layers if before is None else before

    def use_rows(self, rows: list[int], num_real: int) -> None:
        """Go on with these rows; only the first `num_real` are streamed and counted."""
        self._discard_ahead()
        self.placement.rows, self.placement.num_real = rows, num_real
        self._sealed_tokens = None
        if self._tail is not None:
            self._tail.count_rows(num_real)

    def next_is_alike(self) -> bool:
        """True if one more token per row leaves the same layers resident."""
        layer_bytes = self.held_bytes() + 2 * self.placement.num_real * self.token_bytes
        free = self._store.device_budget.free_bytes + self._charged
        return resident_layers(self.num_layers, free, layer_bytes) == self.placement.resident

    def held_bytes(self) -> int:
        """One layer's KV of the real rows, without the tokens being computed."""
        placement = self.placement
        if self._sealed_tokens is None:
            real = set(placement.rows[: placement.num_real])
            self._sealed_tokens = sum(copy.choose(real) for copy in self._copies)
        own = self._tail.length * placement.num_real if self._tail is not None else 0
        return (self._sealed_tokens + own) * self.token_bytes

    # --- one token ---------------------------------------------------------------------------

    def begin(self, new_bytes: int, max_layers: int) -> None:
        """Decide what is resident (Eq. 1, at most `max_layers` layers) and start the first fetches.

        Raises:
            CapacityError: if not even two stream buffers fit.
        """
        budget, layer_bytes = self._store.device_budget, self.held_bytes() + new_bytes
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
        before = self.resident_before
        self.placement.resident = self._offload.resident = resident
        self._count_padding(num_held)
        if not self._begun or resident < before:
            self._write_back(resident)
        if not self._begun:
            self._bring(min(before, resident))
        self._begun = True
        for layer in range(before, resident):
            self._load(layer)
        if resident < self.num_layers:
            self._open_buffers()
            self._fetch_first()

    def ready(self, layer: int) -> None:
        """Compute from here on finds a layer's KV on the device."""
        self._offload.order(self._fetching.get(layer, []))
        self._fetching.pop(layer, None)

    def done(self, layer: int, *, another_token: bool) -> None:
        """A layer was read: its buffer takes the one after the next.

        another_token: the next token needs the same resident layers; the parts of its first
            streamed layer are fetched ahead.
        """
        if layer < self.placement.resident:
            return
        following = layer + NUM_BUFFERS
        if following < self.num_layers:
            self._fetch(following, self.placement.buffers[layer])
        elif following == self.num_layers and another_token:
            buffer, first = self.placement.buffers[layer], self.placement.resident
            pieces = [p for copy in self._copies for p in copy.fetched_pieces(first, buffer)]
            self._ahead = self._submit(Direction.H2D, pieces)
            self.placement.buffers[first] = buffer
        if layer == self.num_layers - 1:
            # The next token's fetches read what this one has stored.
            self._offload.order(self._storing)
            self._storing = []

    def store(self, pieces: Sequence[Piece]) -> Transfer:
        """Write KV back while the layer computes; it is there when the token is done."""
        self._storing.append(self._submit(Direction.D2H, pieces))
        return self._storing[-1]

    def close(self) -> None:
        """Give back the budget; what is on its way arrives first, so that equal runs move
        equal bytes."""
        self._release()
        self._offload.padding.add(-self._padding)
        self._padding = 0
        fetching = [transfer for each in self._fetching.values() for transfer in each]
        pending, leaving = [*self._storing, *fetching], [*self._leaving.values()]
        self._storing, self._leaving, self._fetching = [], {}, {}
        with suppress(LinkError):  # whoever needed the bytes has had the error
            self._offload.wait(leaving)  # the next view reads them on the host
            self._offload.order(pending)
            self._discard_ahead()

    def _write_back(self, resident: int) -> None:
        """What was computed in layers that are not resident any more is written back, each
        segment once, however many copies of it there are."""
        leaving: dict[Segment, int] = {}
        for part in (part for copy in self._copies for part in copy.used_parts):
            if self._store.device_layers(part.segment) > resident:
                leaving[part.segment] = max(part.visible, leaving.get(part.segment, 0))
        by_layer = defaultdict[int, list[Piece]](list)
        for segment, visible in leaving.items():
            for layer in range(resident, self._store.host_from(segment)):
                by_layer[layer] += self._store.leave(segment, visible, layer)
        for layer, pieces in self._tail.leaving_pieces(resident) if self._tail is not None else ():
            by_layer[layer] += pieces
        for layer, pieces in sorted(by_layer.items()):
            self._leaving[layer] = self._submit(Direction.D2H, pieces)
        for copy in self._copies:
            copy.drop_layers(resident)
        for segment in leaving:
            self._store.drop_layers(segment, resident)
        if self._tail is not None:
            self._tail.drop_layers(resident)

    def _bring(self, resident: int) -> None:
        """Segments that no row read while layers became resident lack those."""
        parts = [part for copy in self._copies for part in copy.parts]
        segments = dict.fromkeys(part.segment for part in parts)
        self._offload.order(self._store.bring(segments, resident))

    def _load(self, layer: int) -> None:
        """A layer that was not resident becomes so."""
        pieces = [piece for copy in self._copies for piece in copy.landing_pieces(layer)]
        if self._tail is not None:
            pieces += self._tail.landing_pieces(layer)
        self._fetching[layer] = [self._submit(Direction.H2D, pieces)]

    def _fetch_first(self) -> None:
        first, buffer = self.placement.resident, 0
        if self._ahead is not None:
            buffer = self.placement.buffers[first]
            rest = self._submit(Direction.H2D, self._own_pieces(first, buffer))
            self._fetching[first] = [self._ahead, rest]
            self._ahead = None
        else:
            self._fetch(first, buffer)
        if first + 1 < self.num_layers:
            self._fetch(first + 1, 1 - buffer)

    def _fetch(self, layer: int, buffer: int) -> None:
        leaving = self._leaving.pop(layer, None)
        if leaving is not None:  # it can only be fetched once the host has it
            self._offload.wait([leaving])
        sealed = [piece for copy in self._copies for piece in copy.fetched_pieces(layer, buffer)]
        pieces = [*sealed, *self._own_pieces(layer, buffer)]
        self._fetching[layer] = [self._submit(Direction.H2D, pieces)]
        self.placement.buffers[layer] = buffer

    def _own_pieces(self, layer: int, buffer: int) -> list[Piece]:
        return [] if self._tail is None else self._tail.fetched_pieces(layer, buffer)

    def _submit(self, direction: Direction, pieces: Sequence[Piece]) -> Transfer:
        kind = "stream" if direction is Direction.H2D else "store"
        return self._store.link.submit(direction, kind, pieces)

    def _discard_ahead(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._offload.discarded_bytes += ahead.num_bytes
            self._offload.order([ahead])

    def _open_buffers(self) -> None:
        for copy in self._copies:
            copy.open_buffers()
        if self._tail is not None:
            self._tail.open_buffers()

    def _count_padding(self, num_held: int) -> None:
        layer = sum(copy.layer_bytes for copy in self._copies)
        if self._tail is not None:
            layer += self._tail.layer_bytes
        padding = max(0, num_held * layer - self._charged)
        self._offload.padding.add(padding - self._padding)
        self._padding = padding

    def _release(self) -> None:
        self._store.device_budget.release(self._charged)
        self._charged = 0
