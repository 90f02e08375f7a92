"""SpreadTails: tails whose rows may get several tokens in one pass, each seeing those before it.

Drafts are verified so. A pass over one token of every row is that of `RowTails`.
"""

from __future__ import annotations

import torch

from beamwright.kv.groups import GroupTails
from beamwright.kv.store import RowTails, SegmentStore


class SpreadTails(RowTails):
    """`RowTails` of which a pass computes any tokens, see `spread`: those that a view reads as its
    rows are then the tokens."""

    _rows: torch.Tensor | None = None

    def spread(self, rows: torch.Tensor, places: torch.Tensor, written: torch.Tensor) -> None:
        """Of the next pass token i is row rows[i]'s, at its place places[i] [tokens].

        written: [3, writes] a token, and a row and a place in it that get its KV. What is in none
        pads the batch.
        """
        self._rows, self._spread = rows, places
        source, row, place = written
        self._at = (self._first_slots[row] + place.view(-1, 1, 1)).flatten()
        own = torch.arange(len(source), device=source.device)
        self._source = None if torch.equal(source, own) else source
        self._mask = None

    def together(self) -> None:
        """Passes are over one token of every row again."""
        self._rows = self._mask = None

    @property
    def places(self) -> torch.Tensor:
        return super().places if self._rows is None else self._spread

    @property
    def counts(self) -> torch.Tensor:
        return super().counts if self._rows is None else (self._spread + 1).to(torch.int32)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        if self._rows is None:
            super().write(layer, key_value)
            return
        count = len(self._at) // (2 * self.layout.num_kv_heads)
        some = key_value[:count] if self._source is None else key_value[self._source]
        self._of_layer(layer)[0].index_copy_(0, self._at, some.reshape(-1, self.layout.head_dim))

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(layer)
        if self._rows is None:
            return keys, values
        return keys.index_select(0, self._rows), values.index_select(0, self._rows)


def make_spread_tail(
    store: SegmentStore, capacity: int, *, stays: bool = False
) -> SpreadTails | GroupTails:
    """As `SegmentStore.make_tail`, of a store whose KV is on the device."""
    device, layouts = store.compute_device, store.pool.layouts
    parts = [SpreadTails(each, capacity, store.scratch, device, stays=stays) for each in layouts]
    return parts[0] if len(parts) == 1 else GroupTails(parts)
