"""Tails: contiguous buffers for the newest KV of the rows of a batch, before it goes to blocks.

A tail has the layout that attention reads: contiguous per row, with rows of different lengths.
Whole blocks of a tail's tokens are also copied to the row's segment. Tokens of one head are
adjacent, because at 256 rows attention then reads four to six times as fast as token by token
(docs/log/2026-11.md#operators-and-layout). Tensors say where tokens are written and how many are
read. Their addresses change only when `num_moves` does, so a captured pass can be replayed.

Tails and paths are padded with zeros to one of a few lengths, at which a row's sums are bitwise
equal. So a row's sums do not depend on the lengths of other rows. Three properties of CPU matrix
products decide which lengths are possible:

- Vectors are added to four accumulators in turn, and a remainder of fewer than four vectors to the
  first accumulator. So a length is a multiple of four vectors, or shorter than four vectors.
- A product below some size runs in torch's own loop, which rounds differently. So heads with few
  dimensions get more tokens.
- MKL cuts the sums of a product at 192 tokens, but into halves if fewer than 384 are left (seen on
  a CPU with AVX2 alone, with four or more queries per head).

The start-up self-test checks the bitwise equality on the current machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from beamwright.kv.segments import Segment
from beamwright.kv.store import KVReader
from beamwright.kv.streams import send_to_device

_LEAST_PRODUCT = 400  # tokens * head_dim above which products do not run in torch's own loop
_SHORTEST = 16  # tokens of the shortest padded length


def padded_tail(count: int, head_dim: int) -> int:
    """Return the padded length of a tail with `count` tokens: 16, 32, 64, 128 or 256.

    No tail is longer than 256. Lengths of 192 and 256 round differently, so tails never have 192,
    and paths (`padded_path`) never have 256.
    """
    tokens = _SHORTEST
    while tokens < count or tokens * head_dim <= _LEAST_PRODUCT:
        tokens *= 2
    return tokens


def padded_path(count: int, head_dim: int) -> int:
    """Return the padded length of a path with `count` tokens.

    Lengths are 16, 32, 64, 128, 192, 384, and from there on multiples of 64. If `head_dim` is
    small, the shortest ones are left out, as in `padded_tail`.
    """
    tokens = max(padded_tail(min(count, 64), head_dim), -(-count // 64) * 64 if count > 64 else 0)
    return 384 if 192 < tokens < 384 else tokens


class SessionTail(Protocol):
    """Interface to the newest KV of a batch's rows, in all groups of layers.

    `RowTails` keeps this KV in a buffer, `attention.kernels.own_blocks` writes it directly to
    blocks, and `attention.groups` combines the tails of several groups.
    """

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens for which each row has memory at present."""

    @property
    def num_moves(self) -> int:
        """Number of reallocations. Passes captured before the last one must not be replayed."""

    @property
    def num_bytes(self) -> int: ...

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Keep the rows with these indices, in this order, followed by empty rows."""

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Write KV of a preempted row, [layers, 2, tokens, kv_heads, head_dim] for each group."""

    def set_segments(self, rows: Sequence[tuple[Segment, int] | None]) -> None:
        """Set each row's segment, and how many of the segment's tokens are not in the tail."""

    def set_lengths(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Set each row's number of tokens in the tail, and make room for `max_tokens` more.

        lengths: None for a row whose output is not needed.
        """

    def advance(self) -> None:
        """Move every row to its next token, after all layers have written the current one."""

    def read_tokens(self, parts: Sequence[tuple[int, int, int]]) -> Sequence[Any]:
        """Return a copy of rows' KV, one tensor per group, for `SegmentStore.append`.

        parts: (row, first, end) of the tokens to return.
        """

    def close(self) -> None:
        """Remove all rows."""

    def release(self) -> None:
        """Free the memory."""


class Tail(SessionTail, Protocol):
    """Interface to the tail of one group of layers, for attention.

    capacity: maximum number of tokens of a row.
    places: [rows], the index in the tail at which each row's current token is written.
    mask: additive [rows, 1, 1, tokens] over the tokens that `read` returns; None if all are seen.
    """

    capacity: int

    @property
    def places(self) -> torch.Tensor: ...

    @property
    def mask(self) -> torch.Tensor | None: ...

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the current token of every row: [rows, 2, kv_heads, head_dim]."""

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [rows, kv_heads, tokens, head_dim], the current token included."""


class _MultiTokenPass(NamedTuple):
    """Indices of a pass that computes several tokens per row, such as drafts.

    rows: the row that each token of the pass reads.
    places: the index of each token in that row's tail.
    slots: slots of the buffer to which tokens are written.
    source: for each slot, the token of the pass that is written there.
    """

    rows: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    source: torch.Tensor | slice


class RowTails:
    """Buffer of the rows' newest KV: [layer, K or V, row, kv_head, token, head_dim].

    capacity: maximum number of tokens of a row.
    storage: the memory in this shape, for the present rows and tokens.
    places: [rows] int64, the index at which each row's current token is written.
    counts: [rows] int32, the number of tokens that attention reads, the current one included.
    mask: additive [rows, 1, 1, tokens].
    stays: True: memory is kept when all rows have left, until `release`.
    """

    def __init__(self, store: KVReader, capacity: int, *, stays: bool = False) -> None:
        self.layout, self.capacity, self.num_moves = store.kv.layout, capacity, 0
        layout, device = store.kv.layout, store.compute_device
        self._scratch, self._device, self._stays = store.scratch, device, stays
        self._flat = torch.empty(0, dtype=layout.dtype, device=device)
        self._places = torch.zeros(0, dtype=torch.long, device=device)
        self._first_slots = self._places  # slots of token 0 [rows, 2, kv_heads]
        # Slots of the current token in a layer [rows * 2 * kv_heads]: a view of the end of
        # `_places`, behind the rows' places, so that one addition advances both.
        self._slots = self._places
        self._counts = torch.ones(0, dtype=torch.int32, device=device)
        self._masks = torch.empty(0, 0, dtype=layout.dtype, device=device)
        self._mask: torch.Tensor | None = None
        self._layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._multi: _MultiTokenPass | None = None
        self._set_shape(0, 0)

    def _of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of a layer: its storage [slots, head_dim], its keys, and its values.

        Views are made once, and kept until the memory's shape changes.
        """
        if not self._layers:
            rows = self.storage.view(self.layout.num_layers, -1, self.layout.head_dim)
            parts = rows, self.storage[:, 0], self.storage[:, 1]
            self._layers = list(zip(*(part.unbind(0) for part in parts), strict=True))
        return self._layers[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocated memory, which may exceed what the present rows use."""
        return self._flat.nbytes

    @property
    def places(self) -> torch.Tensor:
        return self._places[: self.num_rows] if self._multi is None else self._multi.places

    @property
    def counts(self) -> torch.Tensor:
        if self._multi is not None:
            return (self._multi.places + 1).to(torch.int32)
        return self._counts[: self.num_rows]

    @property
    def mask(self) -> torch.Tensor:
        """Causal (and sliding-window) mask over each row's tokens, computed once per token."""
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
        """Keep the rows with these indices, in this order, followed by empty rows."""
        start = 0
        if num_rows == self.num_rows:  # rows before the first one that moves stay in place
            start = next((place for place, row in enumerate(kept) if place != row), len(kept))
        held = self.storage[:, :, list(kept[start:])]
        self._resize(num_rows, self.num_tokens)
        self.storage[:, :, start : len(kept)] = held
        # The KV of a removed row may be NaN, which an attention weight of 0 does not mask.
        self.storage[:, :, len(kept) :] = 0

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Write KV of a row that was preempted, [layers, 2, tokens, kv_heads, head_dim]."""
        (tokens,) = held
        count = tokens.shape[2]
        if count:
            self._grow(count)
            self.storage[:, :, row, :, :count] = tokens.transpose(2, 3)

    def set_segments(self, rows: Sequence[tuple[Segment, int] | None]) -> None:
        """Do nothing: this buffer does not depend on the rows' blocks."""

    def read_tokens(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Return KV of (row, first, end) parts as [tokens, layers, 2, kv_heads, head_dim]."""
        rows, first, end = np.array(parts, dtype=np.int64).T
        of_part = np.repeat(np.arange(len(rows)), end - first)
        ahead = np.concatenate([[0], np.cumsum(end - first)[:-1]]) - first
        places = np.arange(len(of_part)) - ahead[of_part]
        at, where = send_to_device(np.stack([rows[of_part], places]), self._device)
        return [self.storage[:, :, at, :, where]]

    def close(self) -> None:
        """Remove all rows. Free the memory unless `stays` is true."""
        self._set_shape(0, 0)
        if not self._stays:
            self.release()

    def release(self) -> None:
        """Free the memory."""
        self._new_flat(0)
        self._set_shape(0, 0)

    # --- tokens ------------------------------------------------------------------------------

    def set_lengths(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Set each row's number of tokens in the tail, and make room for `max_tokens` more.

        lengths: None for a row whose output is not needed.
        """
        known = [length for length in lengths if length is not None]
        self._grow(max(known) + max_tokens)
        spare = known[0] if min(known) == max(known) else 0
        places = [spare if length is None else length for length in lengths]
        self.places.copy_(send_to_device(places, self._device))
        torch.add(
            self._first_slots,
            self.places.view(-1, 1, 1),
            out=self._slots.view_as(self._first_slots),
        )
        self.counts.copy_(self.places + 1)
        self._mask = None

    def advance(self) -> None:
        """Move every row to its next token, by kernels alone."""
        self._places[: self.num_rows + len(self._slots)].add_(1)
        self.counts.add_(1)
        self._mask = None

    @property
    def passes(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Indices of the coming pass for kernels: (slots, source, rows).

        slots: where KV is written, [tokens * 2 * kv_heads]. source: the token of the pass whose KV
        is written to each slot. rows: the row that each token reads. source and rows are None if
        token i of the pass belongs to row i.
        """
        if self._multi is None:
            return self._slots, None, None
        source = self._multi.source
        given = source.contiguous() if isinstance(source, torch.Tensor) else None
        return self._multi.slots, given, self._multi.rows.contiguous()

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store KV [rows, 2, kv_heads, head_dim] of the current token of every row."""
        slots = self._slots
        if self._multi is not None:
            slots, key_value = self._multi.slots, key_value[self._multi.source]
        # One index over [slots, head_dim] is twice as fast as two indices (rows and places).
        numbers = key_value.reshape(-1, self.layout.head_dim)
        self._of_layer(layer)[0].index_copy_(0, slots, numbers)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [rows, kv_heads, tokens, head_dim].

        A row's own tokens are the first `counts` of them.
        """
        keys, values = self._of_layer(layer)[1:]
        if self._multi is None:
            return keys, values
        rows = self._multi.rows
        return keys.index_select(0, rows), values.index_select(0, rows)

    def begin_multi_token_pass(
        self, rows: torch.Tensor, places: torch.Tensor, written: torch.Tensor
    ) -> None:
        """Set up a pass that computes several tokens per row, each after the ones before it.

        rows, places: [tokens], the row of each token, and its index in the row's tail.
        written: [3, writes], index of a token in the pass, and the row and index in its tail to
            which the token's KV is written. Tokens that are not written pad the batch.
        """
        source, row, place = written
        count, alone = len(source), torch.arange(len(source), device=source.device)
        slots = (self._first_slots[row] + place.view(-1, 1, 1)).flatten()
        once = slice(count) if torch.equal(source, alone) else source
        self._multi, self._mask = _MultiTokenPass(rows, places, slots, once), None

    def end_multi_token_pass(self) -> None:
        """Undo `begin_multi_token_pass`: later passes compute one token per row again."""
        self._multi = self._mask = None

    # --- memory ------------------------------------------------------------------------------

    def _grow(self, count: int) -> None:
        tokens = padded_tail(min(count, self.capacity), self.layout.head_dim)
        held = self.num_tokens
        if tokens > held:
            old = self.storage.clone() if self.num_rows and held else None
            self._resize(self.num_rows, tokens)
            if old is not None:
                self.storage[..., :held, :] = old
            self.storage[..., held:, :] = 0  # KV of removed rows may be NaN

    def _resize(self, num_rows: int, num_tokens: int) -> None:
        needed = prod(self._shape(num_rows, num_tokens))
        if needed > self._flat.numel():
            self._new_flat(needed)
        num_slots = 2 * num_rows * self.layout.num_kv_heads
        if num_rows + num_slots > len(self._places):
            self._places = self._places.new_zeros(num_rows + num_slots)
            self._counts = torch.ones(num_rows, dtype=torch.int32, device=self._device)
            self.num_moves += 1
        self._set_shape(num_rows, num_tokens)
        self._slots = self._places[num_rows : num_rows + num_slots]
        heads = torch.arange(num_slots, device=self._device)
        by_half = (heads * num_tokens).view(2, num_rows, -1)
        self._first_slots = by_half.transpose(0, 1).contiguous()
        self._mask = None

    def _new_flat(self, num_elements: int) -> None:
        # Old memory is freed first, since at 64 rows of a 7B shape it can be gigabytes. The memory
        # is zeroed, because masked positions must not hold NaNs.
        self._scratch.count_unchecked(-self._flat.nbytes)
        self._flat = self.storage = self._flat.new_empty(0)
        self._layers = []
        self._flat = self._flat.new_zeros(num_elements)
        self.num_moves += 1
        self._scratch.count_unchecked(self._flat.nbytes)

    def _set_shape(self, num_rows: int, num_tokens: int) -> None:
        self.num_rows, self.num_tokens = num_rows, num_tokens
        shape = self._shape(num_rows, num_tokens)
        self.storage = self._flat[: prod(shape)].view(shape)
        self._layers = []

    def _shape(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        layout = self.layout
        return (layout.num_layers, 2, num_rows, layout.num_kv_heads, num_tokens, layout.head_dim)
