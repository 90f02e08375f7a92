"""Tails: the newest tokens of the rows of a decode session.

A tail is a working copy in the layout that attention wants, contiguous per row, of any lengths;
its tokens are stored in the blocks that are filled beside it. Tokens of one head lie next to each
other: at 256 rows that reads four to six times as fast as token by token
(docs/log/2026-11.md#operators-and-layout). Where a token is written and how many are read is in
tensors, at addresses that stay as long as `num_moves` does: a captured step can be replayed.

Keys are padded to few lengths, so that a row's sums do not depend on how long others' are. With
zeros behind a row's own tokens its sums are the same at every length given here, because

- sums of vectors go to four accumulators in turn, and a rest of fewer than four vectors to the
  first: a length holds a multiple of four vectors, or is so short that all is rest;
- a product below some size is torch's own loop, which rounds differently: heads of few dimensions
  get more tokens;
- MKL cuts the sums of a product at 192 tokens, but in halves where fewer than 384 are left (seen on
  a CPU with AVX2 alone, four queries or more per head).

The start-up self-test asks the machine at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from beamwright.kv.segments import Segment
from beamwright.kv.store import KVReader
from beamwright.kv.streams import sent

_LEAST_PRODUCT = 400
_SHORTEST = 16


def padded_tail(count: int, head_dim: int) -> int:
    """16, 32, 64, 128, 256: no tail is longer, and 192 and 256 do not go together."""
    tokens = _SHORTEST
    while tokens < count or tokens * head_dim <= _LEAST_PRODUCT:
        tokens *= 2
    return tokens


def padded_path(count: int, head_dim: int) -> int:
    """16, 32, 64, 128, 192, and from 384 on multiples of 64."""
    tokens = max(padded_tail(min(count, 64), head_dim), -(-count // 64) * 64 if count > 64 else 0)
    return 384 if 192 < tokens < 384 else tokens


class SessionTail(Protocol):
    """What a decode session asks of its rows' newest tokens, in all groups of layers.

    `RowTails` copies them, `attention.kernels.own` reads them in blocks, `attention.groups` has a
    tail for each group.
    """

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""

    @property
    def num_tokens(self) -> int:
        """Tokens for which every row has places."""

    @property
    def num_moves(self) -> int:
        """How often memory was allocated anew."""

    @property
    def num_bytes(self) -> int: ...

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Go on with these rows in this order, and with free ones behind them."""

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Put back a row's tokens, [layers, 2, tokens, kv_heads, head_dim] by group."""

    def find(self, rows: Sequence[tuple[Segment, int] | None]) -> None:
        """Rows go on in the blocks of these segments, behind so many tokens of them."""

    def begin(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Rows hold so many tokens each, and get up to `max_tokens` more; None for unread rows."""

    def advance(self) -> None:
        """The current token is complete."""

    def take(self, parts: Sequence[tuple[int, int, int]]) -> Sequence[Any]:
        """Tokens [first, end) of rows, each (row, first, end), as their store's `append` wants
        them."""

    def close(self) -> None:
        """No rows are left."""

    def release(self) -> None:
        """Give the memory back."""


class Tail(SessionTail, Protocol):
    """What an attention view asks of the tail of its group of layers.

    capacity: most tokens of a row. places: [rows] where each row's current token is written. mask:
    additive [rows, 1, 1, tokens] over what `read` returns; None where all of it is seen.
    """

    capacity: int

    @property
    def places(self) -> torch.Tensor: ...

    @property
    def mask(self) -> torch.Tensor | None: ...

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim], the current token included."""


class _Spread(NamedTuple):
    """A pass over any tokens: rows that they are read from, their places, and the slots that the
    tokens of `source` are written to."""

    rows: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    source: torch.Tensor | slice


class RowTails:
    """KV [layer, K or V, row, kv_head, token, head_dim] of up to `capacity` tokens a row.

    storage: all of it, as it is shaped now.
    places: [rows] int64, where each row's current token is written. counts: [rows] int32, tokens
    that attention reads, the current one included. mask: additive [rows, 1, 1, tokens].
    stays: its memory outlives the rows, until `release`.
    """

    def __init__(self, store: KVReader, capacity: int, *, stays: bool = False) -> None:
        self.layout, self.capacity, self.num_moves = store.kv.layout, capacity, 0
        layout, device = store.kv.layout, store.compute_device
        self._scratch, self._device, self._stays = store.scratch, device, stays
        self._flat = torch.empty(0, dtype=layout.dtype, device=device)
        self._places = torch.zeros(0, dtype=torch.long, device=device)
        self._first_slots = self._places  # of every row, K or V and head, at the row's token 0
        # Where in a layer the current token is written [rows * 2 * kv_heads]: behind the places, so
        # that one addition moves all of them on.
        self._slots = self._places
        self._counts = torch.ones(0, dtype=torch.int32, device=device)
        self._masks = torch.empty(0, 0, dtype=layout.dtype, device=device)
        self._mask: torch.Tensor | None = None
        self._layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._spread: _Spread | None = None
        self._show(0, 0)

    def _of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's rows of numbers, its keys and its values: views, made once."""
        if not self._layers:
            rows = self.storage.view(self.layout.num_layers, -1, self.layout.head_dim)
            parts = rows, self.storage[:, 0], self.storage[:, 1]
            self._layers = list(zip(*(part.unbind(0) for part in parts), strict=True))
        return self._layers[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory, whatever the present rows use of it."""
        return self._flat.nbytes

    @property
    def places(self) -> torch.Tensor:
        return self._places[: self.num_rows] if self._spread is None else self._spread.places

    @property
    def counts(self) -> torch.Tensor:
        if self._spread is not None:
            return (self._spread.places + 1).to(torch.int32)
        return self._counts[: self.num_rows]

    @property
    def mask(self) -> torch.Tensor:
        """Made once per token."""
        if self._mask is None:
            if self._masks.shape[0] != self.num_tokens:
                size = (self.num_tokens, self.num_tokens)
                hidden = torch.full(size, -torch.inf, device=self._device)
                masks = hidden.triu(1)
                if self.layout.window is not None:
                    masks += hidden.tril(-self.layout.window)
                self._masks = masks.to(self.layout.dtype)
            self._mask = self._masks[self.places][:, None, None]
        return self._mask

    # --- rows --------------------------------------------------------------------------------

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Go on with these rows in this order, and with free ones behind them."""
        start = 0
        if num_rows == self.num_rows:  # those in front, as far as none has left, stay in place
            start = next((place for place, row in enumerate(kept) if place != row), len(kept))
        held = self.storage[:, :, list(kept[start:])]
        self._resize(num_rows, self.num_tokens)
        self.storage[:, :, start : len(kept)] = held
        # Of a row that has left, NaN may be here, and a weight of zero does not mask it.
        self.storage[:, :, len(kept) :] = 0

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Put back a row's tokens [layers, 2, tokens, kv_heads, head_dim] of the one group."""
        (tokens,) = held
        count = tokens.shape[2]
        if count:
            self._grow(count)
            self.storage[:, :, row, :, :count] = tokens.transpose(2, 3)

    def find(self, rows: Sequence[tuple[Segment, int] | None]) -> None:
        """Nothing: tokens are here, wherever their blocks are."""

    def take(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Tokens [first, end) of rows in the pool's order [tokens, layers, 2, kv_heads, dim]."""
        rows, first, end = np.array(parts, dtype=np.int64).T
        of_part = np.repeat(np.arange(len(rows)), end - first)
        ahead = np.concatenate([[0], np.cumsum(end - first)[:-1]]) - first
        places = np.arange(len(of_part)) - ahead[of_part]
        at, where = sent(np.stack([rows[of_part], places]), self._device)
        return [self.storage[:, :, at, :, where]]

    def close(self) -> None:
        """No rows are left."""
        self._show(0, 0)
        if not self._stays:
            self.release()

    def release(self) -> None:
        """Give the memory back."""
        self._new_flat(0)
        self._show(0, 0)

    # --- tokens ------------------------------------------------------------------------------

    def begin(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Rows hold so many tokens each, and get up to `max_tokens` more; None for unread rows."""
        known = [length for length in lengths if length is not None]
        self._grow(max(known) + max_tokens)
        spare = known[0] if min(known) == max(known) else 0
        places = [spare if length is None else length for length in lengths]
        self.places.copy_(sent(places, self._device))
        torch.add(
            self._first_slots,
            self.places.view(-1, 1, 1),
            out=self._slots.view_as(self._first_slots),
        )
        self.counts.copy_(self.places + 1)
        self._mask = None

    def advance(self) -> None:
        """The current token is complete, on the device."""
        self._places[: self.num_rows + len(self._slots)].add_(1)
        self.counts.add_(1)
        self._mask = None

    @property
    def passes(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Slots that a pass writes [tokens * 2 * kv_heads], the tokens that go there, and the rows
        that it reads; None: each its own, in order."""
        if self._spread is None:
            return self._slots, None, None
        source = self._spread.source
        given = source.contiguous() if isinstance(source, torch.Tensor) else None
        return self._spread.slots, given, self._spread.rows.contiguous()

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""
        slots = self._slots
        if self._spread is not None:
            slots, key_value = self._spread.slots, key_value[self._spread.source]
        # One index into rows of numbers: twice as fast as rows and places, which torch interleaves.
        numbers = key_value.reshape(-1, self.layout.head_dim)
        self._of_layer(layer)[0].index_copy_(0, slots, numbers)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim]; `counts` of them are a row's."""
        keys, values = self._of_layer(layer)[1:]
        if self._spread is None:
            return keys, values
        rows = self._spread.rows
        return keys.index_select(0, rows), values.index_select(0, rows)

    def spread(self, rows: torch.Tensor, places: torch.Tensor, written: torch.Tensor) -> None:
        """The next pass is over any tokens, which are its rows then, each seeing those before it.

        Token i is row rows[i]'s, at its place places[i] [tokens]. written: [3, writes] a token, and
        a row and a place in it that get its KV; what is in none pads the batch.
        """
        source, row, place = written
        count, alone = len(source), torch.arange(len(source), device=source.device)
        slots = (self._first_slots[row] + place.view(-1, 1, 1)).flatten()
        once = slice(count) if torch.equal(source, alone) else source
        self._spread, self._mask = _Spread(rows, places, slots, once), None

    def together(self) -> None:
        """Passes are over one token of every row again."""
        self._spread = self._mask = None

    # --- memory ------------------------------------------------------------------------------

    def _grow(self, count: int) -> None:
        tokens = padded_tail(min(count, self.capacity), self.layout.head_dim)
        held = self.num_tokens
        if tokens > held:
            old = self.storage.clone() if self.num_rows and held else None
            self._resize(self.num_rows, tokens)
            if old is not None:
                self.storage[..., :held, :] = old
            self.storage[..., held:, :] = 0  # of other rows, as above

    def _resize(self, num_rows: int, num_tokens: int) -> None:
        needed = prod(self._shape(num_rows, num_tokens))
        if needed > self._flat.numel():
            self._new_flat(needed)
        num_slots = 2 * num_rows * self.layout.num_kv_heads
        if num_rows + num_slots > len(self._places):
            self._places = self._places.new_zeros(num_rows + num_slots)
            self._counts = torch.ones(num_rows, dtype=torch.int32, device=self._device)
            self.num_moves += 1
        self._show(num_rows, num_tokens)
        self._slots = self._places[num_rows : num_rows + num_slots]
        heads = torch.arange(num_slots, device=self._device)
        by_half = (heads * num_tokens).view(2, num_rows, -1)
        self._first_slots = by_half.transpose(0, 1).contiguous()
        self._mask = None

    def _new_flat(self, num_elements: int) -> None:
        # The old memory goes first: at 64 rows of a 7B shape it can be gigabytes. Zeros: what is
        # masked must be a number.
        self._scratch.add(-self._flat.nbytes)
        self._flat = self.storage = self._flat.new_empty(0)
        self._layers = []
        self._flat = self._flat.new_zeros(num_elements)
        self.num_moves += 1
        self._scratch.add(self._flat.nbytes)

    def _show(self, num_rows: int, num_tokens: int) -> None:
        self.num_rows, self.num_tokens = num_rows, num_tokens
        shape = self._shape(num_rows, num_tokens)
        self.storage = self._flat[: prod(shape)].view(shape)
        self._layers = []

    def _shape(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        layout = self.layout
        return (layout.num_layers, 2, num_rows, layout.num_kv_heads, num_tokens, layout.head_dim)
