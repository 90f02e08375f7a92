"""Dense layout: every beam has its own contiguous copy of its path, as in the LBS paper.

The copies are working memory, packed from the blocks of each beam's own copy in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beamwright.attention.partial import KEY_MULTIPLE, attend_few, attend_part, round_up, with_sinks
from beamwright.attention.shared import Entry, Hold, ResidentLayers
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


class Packing:
    """Index tables between [tokens] packed path after path and [rows, padded tokens].

    Rows are padded to a multiple of 16 tokens: they are queries and keys at once, see `partial`.
    Packed tokens beyond the sum
    of `lengths` are padding of the batch and belong to no row.
    """

    def __init__(self, lengths: Sequence[int], num_kv_heads: int, device: torch.device) -> None:
        self.num_rows = len(lengths)
        self.num_padded = round_up(max(lengths), KEY_MULTIPLE)
        self.num_kv_heads = num_kv_heads
        starts = torch.tensor([0, *lengths], device=device).cumsum(0)[:-1].unsqueeze(1)
        count = torch.tensor(list(lengths), device=device).unsqueeze(1)
        steps = torch.arange(self.num_padded, device=device)
        # Padding reads the row's last token: any finite value will do.
        self.packed_of_padded = (starts + torch.minimum(steps, count - 1)).flatten()
        self.padded_of_packed = (steps < count).flatten().nonzero().squeeze(1)

    def pad(self, packed: Tensor) -> Tensor:
        """[tokens, ...] to [rows, padded, ...]."""
        picked = packed.index_select(0, self.packed_of_padded)
        return picked.view(self.num_rows, self.num_padded, *packed.shape[1:])

    def queries(self, query: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to [rows, kv_heads, padded * group, head_dim]."""
        padded = self.pad(query).unflatten(2, (self.num_kv_heads, -1))
        queries: Tensor = padded.permute(0, 2, 1, 3, 4).flatten(2, 3)
        return queries

    def unpack(self, context: Tensor, like: Tensor) -> Tensor:
        """[rows, padded * group, kv_heads, head_dim] to [tokens, heads, head_dim]."""
        by_token = context.unflatten(1, (self.num_padded, -1)).transpose(2, 3).flatten(0, 1)
        picked: Tensor = by_token.index_select(0, self.padded_of_packed).flatten(1, 2)
        if picked.shape[0] == like.shape[0]:
            return picked
        out = picked.new_zeros(like.shape[0], *picked.shape[1:])
        out[: picked.shape[0]] = picked
        return out


class DensePrefill:
    """An `AttentionView`: new tokens after each path's copy, one causal attention per row."""

    def __init__(
        self,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
        hold: Hold = ResidentLayers,
    ) -> None:
        device, self._softcap = store.compute_device, store.kv.layout.softcap
        self._packing = Packing(lengths, store.kv.layout.num_kv_heads, device)
        self._copies = PathCopies(store, paths, self._packing.num_padded, hold)
        steps = torch.arange(self._packing.num_padded, device=device)
        self._at = self._copies.lengths.unsqueeze(1) + steps
        self._rows = torch.arange(len(paths), device=device).unsqueeze(1)
        self._mask = self._copies.causal_mask(self._packing.num_padded)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        packing, data = self._packing, self._copies.layers.layer(layer)
        data[:, self._rows, :, self._at] = packing.pad(key_value)
        group = query.shape[1] // key_value.shape[2]
        mask = self._mask.repeat_interleave(group, dim=1).unsqueeze(1)
        keys, values = data[0], data[1]
        context, lse = attend_part(packing.queries(query), keys, values, mask, self._softcap)
        out = packing.unpack(context, query)
        if sinks is None:
            return out
        return with_sinks(out, packing.unpack(lse.unsqueeze(-1), query).squeeze(-1), sinks)

    def close(self) -> None:
        self._copies.close()


class DenseAttention:
    """Backend `dense`."""

    name = "dense"
    copies_per_beam = True
    spreads = True
    tail_tokens = 64
    decode_view = DenseDecode
    prefill_view = DensePrefill
