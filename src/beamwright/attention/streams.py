"""Layers of packed KV that pass through two device buffers, token by token.

The mechanism of `layerwise` (LBS section 4.1, Eq. 1-2): which layers are resident for a token, what
crosses the link and when. Knows no attention operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from beamwright.attention.device_copy import DeviceCopy
from beamwright.attention.layers import Entry, LayerSource, pack
from beamwright.attention.offload import (
    NUM_BUFFERS,
    Offload,
    PackedCopy,
    StreamedCopy,
    resident_layers,
)
from beamwright.errors import LinkError, format_bytes
from beamwright.kv import Direction, KVLayout, LayeredStore, Piece, Segment, SegmentStore, Transfer

if TYPE_CHECKING:
    from beamwright.attention.device_tail import DeviceTail
    from beamwright.attention.streamed_tail import StreamedTail


class LayerStreams:
    """The layers of one view, token by token: `begin`, then per layer `ready` and `done`.

    rows: original numbers of the rows of the present batch, real ones first.
    resident: layers [0, resident) stay on the device for this token.
    leaving: segments of which layers are being sent home, whichever copies they stand in.
    """

    def __init__(self, offload: Offload, layout: KVLayout, num_rows: int) -> None:
        self.offload = offload
        self.num_layers = layout.num_layers
        self.token_bytes = layout.bytes_per_token // layout.num_layers
        self.device = torch.device("cpu")
        self.copies: list[PackedCopy] = []
        self.resident = layout.num_layers
        self.rows = list(range(num_rows))
        self.num_real = num_rows
        self.tail: StreamedTail | DeviceTail | None = None
        self._sealed_tokens: int | None = None
        self._slots: dict[int, int] = {}
        self._fetching: dict[int, list[Transfer]] = {}
        self._storing: list[Transfer] = []
        self._leaving: dict[int, Transfer] = {}
        self._ahead: Transfer | None = None
        self._charged = self._padding = 0
        self._layered: LayeredStore | None = None
        self._brought = False
        self.leaving: dict[Segment, None] = {}

    @property
    def grows(self) -> bool:
        """True if the packed copies hold the rows' own tokens too."""
        return any(copy.grows for copy in self.copies)

    def hold(self, store: SegmentStore, entries: Sequence[Entry], num_tokens: int) -> LayerSource:
        """See `layers.Hold`."""
        self.device = store.compute_device
        if isinstance(store, LayeredStore):
            self._layered = store
            self.copies.append(DeviceCopy(self, store, entries, num_tokens))
        else:
            data = pack(store, entries, num_tokens)
            self.copies.append(StreamedCopy(self.slot_of, data, entries))
        return self.copies[-1]

    @property
    def resident_before(self) -> int:
        """Layers that stayed on the device when the view before ended."""
        before = self.offload.resident
        return self.num_layers if before is None else before

    def slot_of(self, layer: int) -> int | None:
        """The stream buffer that holds a layer; None if the layer is resident."""
        return None if layer < self.resident else self._slots[layer]

    def use_rows(self, rows: list[int], num_real: int) -> None:
        """Go on with these rows; only the first `num_real` are streamed and counted."""
        self._discard_ahead()
        self.rows, self.num_real, self._sealed_tokens = rows, num_real, None
        if self.tail is not None:
            self.tail.count_rows(num_real)

    def next_is_alike(self) -> bool:
        """True if one more token per row leaves the same layers resident."""
        layer_bytes = self.held_bytes() + 2 * self.num_real * self.token_bytes
        free = self.offload.budget.free_bytes + self._charged
        return resident_layers(self.num_layers, free, layer_bytes) == self.resident

    def held_bytes(self) -> int:
        """One layer's KV of the real rows, without the tokens being computed."""
        if self._sealed_tokens is None:
            real = set(self.rows[: self.num_real])
            self._sealed_tokens = sum(copy.choose(real) for copy in self.copies)
        own = self.tail.length * self.num_real if self.tail is not None else 0
        return (self._sealed_tokens + own) * self.token_bytes

    # --- one token ---------------------------------------------------------------------------

    def begin(self, new_bytes: int, most: int) -> None:
        """Decide what is resident (Eq. 1, at most `most` layers) and start the first fetches.

        Raises:
            CapacityError: if not even two stream buffers fit.
        """
        offload, layer_bytes = self.offload, self.held_bytes() + new_bytes
        self._release()
        free = offload.budget.free_bytes
        resident = min(most, resident_layers(self.num_layers, free, layer_bytes))
        if resident != self.resident:
            self._discard_ahead()
        num_held = resident if resident == self.num_layers else resident + NUM_BUFFERS
        offload.budget.charge(
            num_held * layer_bytes,
            f"{num_held} layers of {format_bytes(layer_bytes)} "
            f"({NUM_BUFFERS} of them stream buffers)",
        )
        self._charged = num_held * layer_bytes
        before = self.resident_before
        self.resident = offload.resident = resident
        self._count_padding(num_held)
        self._write_home()
        self._bring(min(before, resident))
        for layer in range(before, resident):
            self._load(layer)
        if resident < self.num_layers:
            self._open_buffers()
            self._fetch_first()

    def ready(self, layer: int) -> None:
        """Compute from here on finds a layer's KV on the device."""
        self.offload.order(self._fetching.get(layer, []))
        self._fetching.pop(layer, None)

    def done(self, layer: int, *, another_token: bool) -> None:
        """A layer was read: its buffer takes the one after the next.

        another_token: the next token needs the same resident layers; the parts of its first
            streamed layer are fetched ahead.
        """
        if layer < self.resident:
            return
        following = layer + NUM_BUFFERS
        if following < self.num_layers:
            self._fetch(following, self._slots[layer])
        elif following == self.num_layers and another_token:
            slot, first = self._slots[layer], self.resident
            pieces = [p for copy in self.copies for p in copy.sealed_pieces(first, slot)]
            self._ahead = self._submit(pieces)
            self._slots[first] = slot
        if layer == self.num_layers - 1:
            # The next token's fetches read what this one has sent home.
            self.offload.order(self._storing)
            self._storing = []

    def store(self, pieces: Sequence[Piece]) -> Transfer:
        """Send KV home while the layer computes; it is there when the token is done."""
        self._storing.append(self._send(pieces))
        return self._storing[-1]

    def close(self) -> None:
        """Give back the budget; what is on its way arrives first, so that equal runs move
        equal bytes."""
        self._release()
        self.offload.padding.add(-self._padding)
        self._padding = 0
        if self.tail is not None:
            self.offload.home.used(self.tail.home_from)
        fetching = [transfer for each in self._fetching.values() for transfer in each]
        pending, leaving = [*self._storing, *fetching], [*self._leaving.values()]
        self._storing, self._leaving, self._fetching = [], {}, {}
        with suppress(LinkError):  # whoever needed the bytes has been told
            self.offload.wait(leaving)  # the next view reads them on the host
            self.offload.order(pending)
            self._discard_ahead()

    def _write_home(self) -> None:
        """What was computed in layers that are not resident any more goes home once."""
        home, by_layer = self.offload.home, defaultdict[int, list[Piece]](list)
        for layer, piece in home.write(self.copies, self.resident):
            by_layer[layer].append(piece)
        for layer, piece in [
            each for copy in self.copies for each in copy.kept_pieces(self.resident)
        ]:
            by_layer[layer].append(piece)
        if self.tail is None:
            home.used(self.resident)
        else:
            for layer, piece in self.tail.write_home(self.resident):
                by_layer[layer].append(piece)
        for layer, pieces in sorted(by_layer.items()):
            self._leaving[layer] = self._send(pieces)
        for copy in self.copies:
            copy.left(self.resident)
        self.leaving = {}
        if self.tail is not None:
            self.tail.left(self.resident)

    def _bring(self, resident: int) -> None:
        """Segments that no row read while layers became resident lack those."""
        if self._layered is not None and not self._brought:
            parts = [part for copy in self.copies for e in copy.entries for part in e.parts]
            segments = dict.fromkeys(part.segment for part in parts)
            self.offload.order(self._layered.bring(segments, resident))
        self._brought = True

    def _load(self, layer: int) -> None:
        """A layer that was not resident becomes so."""
        pieces = [piece for copy in self.copies for piece in copy.landing_pieces(layer)]
        if self.tail is not None:
            pieces += self.tail.landing_pieces(layer)
        self._fetching[layer] = [self._submit(pieces)]

    def _fetch_first(self) -> None:
        first, slot = self.resident, 0
        if self._ahead is not None:
            slot = self._slots[first]
            rest = self._submit(self._own_pieces(first, slot))
            self._fetching[first] = [self._ahead, rest]
            self._ahead = None
        else:
            self._fetch(first, slot)
        if first + 1 < self.num_layers:
            self._fetch(first + 1, 1 - slot)

    def _fetch(self, layer: int, slot: int) -> None:
        leaving = self._leaving.pop(layer, None)
        if leaving is not None:  # it can only be fetched once it is at home
            self.offload.wait([leaving])
        sealed = [piece for copy in self.copies for piece in copy.sealed_pieces(layer, slot)]
        pieces = [*sealed, *self._own_pieces(layer, slot)]
        self._fetching[layer] = [self._submit(pieces)]
        self._slots[layer] = slot

    def _own_pieces(self, layer: int, slot: int) -> list[Piece]:
        if self.tail is None:
            return []
        if not self.grows:
            return self.tail.pieces(layer, slot)
        length = self.tail.length
        return [p for copy in self.copies for p in copy.grown_pieces(layer, slot, length)]

    def _submit(self, pieces: Sequence[Piece]) -> Transfer:
        return self.offload.link.submit(Direction.H2D, "stream", pieces)

    def _send(self, pieces: Sequence[Piece]) -> Transfer:
        return self.offload.link.submit(Direction.D2H, "store", pieces)

    def _discard_ahead(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self.offload.discarded_bytes += ahead.num_bytes
            self.offload.order([ahead])

    def _open_buffers(self) -> None:
        for copy in self.copies:
            copy.open_buffers()
        if self.tail is not None and not self.grows:
            self.tail.open_buffers()

    def _count_padding(self, num_held: int) -> None:
        layer = sum(copy.layer_bytes for copy in self.copies)
        if self.tail is not None and not self.grows:
            layer += self.tail.layer_bytes
        padding = max(0, num_held * layer - self._charged)
        self.offload.padding.add(padding - self._padding)
        self._padding = padding

    def _release(self) -> None:
        self.offload.budget.release(self._charged)
        self._charged = 0
