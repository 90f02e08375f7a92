"""Dense layout: every beam has its own contiguous copy of its path, as in the LBS paper.

The copies are working memory, packed from the blocks of each beam's own copy in the pool. They are
what decoding reads; given tokens are read once for all rows, as in `tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beamwright.attention.partial import attend_few, with_sinks
from beamwright.attention.shared import Entry, Hold, ResidentLayers
from beamwright.attention.tree_prefill import TreePrefill
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail, padded_path


class PathCopies:
    """Copies [layer, K or V, row, kv_head, token, head_dim] of whole paths, padded to the longest.

    `room` more tokens are free behind each row's own path, so that a row's tokens are at the
    same offsets whoever shares the batch.
    """

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], room: int, hold: Hold = ResidentLayers
    ) -> None:
        layout = store.kv.layout
        entries = [Entry(tuple(path), (row,), room) for row, path in enumerate(paths)]
        lengths = [entry.num_tokens for entry in entries]
        tokens = padded_path(max(lengths) + room, layout.head_dim)
        self.lengths = torch.tensor(lengths, device=store.compute_device)
        self.layers = hold(store, entries, tokens)
        self._num_tokens, self._layout = tokens, layout
        self._scratch = store.scratch
        self._counted = layout.read_bytes_per_token * len(entries) * tokens
        self._scratch.add(self._counted)

    def causal_mask(self, num_new: int) -> Tensor:
        """Additive [rows, num_new, tokens]: new token j sees the path and new tokens up to j,
        as far as a window reaches."""
        tokens = torch.arange(self._num_tokens, device=self.lengths.device)
        last = self.lengths.unsqueeze(1) + torch.arange(num_new, device=self.lengths.device)
        shape = (*last.shape, len(tokens))
        mask = torch.zeros(shape, dtype=self._layout.dtype, device=tokens.device)
        mask.masked_fill_(tokens > last.unsqueeze(2), float("-inf"))
        if self._layout.window is not None:
            first = last.unsqueeze(2) - self._layout.window
            mask.masked_fill_(tokens <= first, float("-inf"))
        return mask

    def close(self) -> None:
        """Give back the copies' bytes."""
        self._scratch.add(-self._counted)
        self._counted = 0


class DenseDecode:
    """A `DecodeView`, one new token per row: over the row's own copy and tail in one piece."""

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], tail: Tail, hold: Hold = ResidentLayers
    ) -> None:
        self._tail, self._softcap = tail, store.kv.layout.softcap
        self._copies = PathCopies(store, paths, tail.capacity, hold)
        self._mask = self._copies.causal_mask(tail.capacity)
        self._rows: Tensor | None = None
        self._kept: Tensor | None = None
        self._copies.layers.restore(tail)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self._tail.write(layer, key_value)
        data, rows = self._copies.layers.layer(layer), self._rows
        if rows is None:
            rows = torch.arange(query.shape[0], device=query.device)
        step = self._tail.places
        data[:, rows, :, self._copies.lengths[rows] + step] = key_value
        mask = self._mask[rows, step]
        both = data if self._rows is None else data[:, rows]
        num_rows, heads, head_dim = query.shape
        grouped = query.view(num_rows, key_value.shape[2], -1, head_dim)
        keys, values = both[0], both[1]
        mask = mask[:, None, None, :]
        context, lse = attend_few(grouped, keys, values, mask, self._softcap)
        return with_sinks(context.view(num_rows, heads, head_dim), lse, sinks)

    def keep_rows(self, rows: Tensor) -> None:
        self.spread(rows)
        self._kept = self._rows

    def spread(self, rows: Tensor | None) -> None:
        kept = self._kept
        self._rows = kept if rows is None else rows if kept is None else kept[rows]

    def count_rows(self, num_rows: int) -> None:
        """Nothing here depends on it."""

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Only packed copies are read, so nothing depends on it."""

    def close(self) -> None:
        self._copies.close()


class DenseAttention:
    """Backend `dense`."""

    name = "dense"
    copies_per_beam = True
    spreads = True
    tail_tokens = 64
    decode_view = DenseDecode
    prefill_view = TreePrefill
