"""Dense layout: every beam has its own contiguous copy of its path, as in the LBS paper.

The copies are charged to the KV budget: this is what sharing on the device saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from beamwright.attention.packing import Packing
from beamwright.attention.partial import KEY_MULTIPLE, attend_few, attend_part, round_up
from beamwright.kv import Path, SegmentStore, TailBuffer


class PathCopies:
    """Copies [layer, K or V, row, kv_head, token, head_dim] of whole paths, padded to the longest.

    `room` more tokens are free behind each row's own path, so that a row's tokens stand at the
    same offsets whoever shares the batch.
    """

    def __init__(self, store: SegmentStore, paths: Sequence[Path], room: int) -> None:
        layout = store.pool.layout
        storage = store.pool.storage
        lengths = [sum(part.visible for part in path) for path in paths]
        tokens = round_up(max(lengths) + room, KEY_MULTIPLE)
        self._budget = store.pool.budget
        self._charged = len(paths) * tokens * layout.bytes_per_token
        self._budget.charge(self._charged, f"the copies of {len(paths)} paths")
        self.lengths = torch.tensor(lengths, device=storage.device)
        self.data = storage.new_zeros(
            (layout.num_layers, 2, len(paths), layout.num_kv_heads, tokens, layout.head_dim)
        )
        for row, path in enumerate(paths):
            at = 0
            for part in path:
                held = store.gather(part.segment, part.visible)
                self.data[:, :, row, :, at : at + part.visible] = held.transpose(2, 3)
                at += part.visible

    def causal_mask(self, num_new: int) -> torch.Tensor:
        """Additive [rows, num_new, tokens]: new token j sees the path and new tokens up to j."""
        tokens = torch.arange(self.data.shape[4], device=self.data.device)
        last = self.lengths.unsqueeze(1) + torch.arange(num_new, device=self.data.device)
        mask = torch.zeros(*last.shape, len(tokens), dtype=self.data.dtype, device=tokens.device)
        return mask.masked_fill_(tokens > last.unsqueeze(2), float("-inf"))

    def close(self) -> None:
        """Release the copies' bytes."""
        self._budget.release(self._charged)
        self._charged = 0


class DenseDecode:
    """One new token per row, attended over the row's own copy and tail in one piece."""

    def __init__(self, store: SegmentStore, paths: Sequence[Path], tail: TailBuffer) -> None:
        self._tail = tail
        self._copies = PathCopies(store, paths, room=tail.capacity)
        self._mask = self._copies.causal_mask(tail.capacity)
        self._rows: torch.Tensor | None = None

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        self._tail.write(layer, key_value)
        step, data, rows = self._tail.length, self._copies.data[layer], self._rows
        if rows is None:
            rows = torch.arange(query.shape[0], device=query.device)
        at = self._copies.lengths[rows] + step
        data[:, rows, :, at] = key_value
        mask = self._mask[:, step] if self._rows is None else self._mask[rows, step]
        both = data if self._rows is None else data[:, rows]
        num_rows, heads, head_dim = query.shape
        grouped = query.view(num_rows, key_value.shape[2], -1, head_dim)
        keys, values = both[0], both[1]
        context, _ = attend_few(grouped, keys, values, mask[:, None, None, :])
        return context.transpose(1, 2).reshape(num_rows, heads, head_dim)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """See `protocols.DecodeView`."""
        self._rows = rows if self._rows is None else self._rows[rows]

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._copies.close()


class DensePrefill:
    """New tokens after each path's copy, one causal attention per row."""

    def __init__(self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]) -> None:
        device = store.pool.storage.device
        self._packing = Packing(lengths, store.pool.layout.num_kv_heads, device)
        self._copies = PathCopies(store, paths, room=self._packing.num_padded)
        steps = torch.arange(self._packing.num_padded, device=device)
        self._at = self._copies.lengths.unsqueeze(1) + steps
        self._rows = torch.arange(len(paths), device=device).unsqueeze(1)
        self._mask = self._copies.causal_mask(self._packing.num_padded)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`."""
        packing, data = self._packing, self._copies.data[layer]
        data[:, self._rows, :, self._at] = packing.pad(key_value)
        group = query.shape[1] // key_value.shape[2]
        mask = self._mask.repeat_interleave(group, dim=1).unsqueeze(1)
        keys, values = data[0], data[1]
        context, _ = attend_part(packing.queries(query), keys, values, mask)
        return packing.unpack(context, query)

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._copies.close()


class DenseAttention:
    """Backend `dense`."""

    name = "dense"
    tail_tokens = 64

    def decode_view(
        self, store: SegmentStore, paths: Sequence[Path], tail: TailBuffer
    ) -> DenseDecode:
        """A view for one token per row."""
        return DenseDecode(store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> DensePrefill:
        """A view for `lengths[i]` new tokens after path i."""
        return DensePrefill(store, paths, lengths)
