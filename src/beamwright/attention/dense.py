"""Backend `dense`: every beam reads its own contiguous copy of its path, as in the LBS paper.

The contiguous copies are working memory for decoding. They are packed from the blocks that each
beam has in the pool. Prefill reads shared segments once for all rows, like the backend `tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beamwright.attention.buckets import Entry, Hold, ResidentLayers
from beamwright.attention.parts import attend_few, with_sinks
from beamwright.attention.protocols import AttentionBackend, DecodeView
from beamwright.attention.tree_prefill import TreePrefill
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail, padded_path


class DenseDecode(DecodeView):
    """A `DecodeView` that attends to each row's own copy of its path and tail as one tensor.

    The copies [layer, K or V, row, kv_head, token, head_dim] are padded to the longest path. A row
    has free space for its tail directly after its own path, so the offsets of its tokens do not
    depend on the other rows of the batch. (A tail is a row's newest tokens, not yet in blocks.)
    """

    def __init__(
        self, store: SegmentStore, paths: Sequence[Path], tail: Tail, hold: Hold = ResidentLayers
    ) -> None:
        self._tail, self._layout, room = tail, store.kv.layout, tail.capacity
        entries = [Entry(tuple(path), (row,), room) for row, path in enumerate(paths)]
        lengths = [entry.num_tokens for entry in entries]
        num_tokens = padded_path(max(lengths) + room, self._layout.head_dim)
        self._lengths = torch.tensor(lengths, device=store.compute_device)
        self._layers = hold(store, entries, num_tokens)
        self._scratch = store.scratch
        self._counted = self._layout.read_bytes_per_token * len(entries) * num_tokens
        self._scratch.count_unchecked(self._counted)
        self._mask = self._causal_mask(num_tokens)
        self._rows: Tensor | None = None
        self._kept: Tensor | None = None
        self._layers.restore(tail)

    def _causal_mask(self, num_tokens: int) -> Tensor:
        """Build the additive mask [rows, tail tokens, num_tokens].

        Entry [row, i, j] is 0 if the row's i-th tail token attends to position j of its copy, and
        minus infinity for later tokens and tokens outside the window.
        """
        tokens = torch.arange(num_tokens, device=self._lengths.device)
        new = torch.arange(self._tail.capacity, device=tokens.device)
        last = (self._lengths.unsqueeze(1) + new).unsqueeze(2)
        mask = torch.zeros(
            (*last.shape[:2], num_tokens), dtype=self._layout.dtype, device=tokens.device
        )
        mask.masked_fill_(tokens > last, float("-inf"))
        if self._layout.window is not None:
            mask.masked_fill_(tokens <= last - self._layout.window, float("-inf"))
        return mask

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self._tail.write(layer, key_value)
        data, rows = self._layers.layer(layer), self._rows
        if rows is None:
            rows = torch.arange(query.shape[0], device=query.device)
        step = self._tail.places
        data[:, rows, :, self._lengths[rows] + step] = key_value
        mask = self._mask[rows, step]
        both = data if self._rows is None else data[:, rows]
        num_rows, heads, head_dim = query.shape
        grouped = query.view(num_rows, key_value.shape[2], -1, head_dim)
        keys, values = both[0], both[1]
        mask = mask[:, None, None, :]
        context, lse = attend_few(grouped, keys, values, mask, self._layout.softcap)
        return with_sinks(context.view(num_rows, heads, head_dim), lse, sinks)

    def keep_rows(self, rows: Tensor) -> None:
        self.set_query_rows(rows)
        self._kept = self._rows

    def set_query_rows(self, rows: Tensor | None) -> None:
        kept = self._kept
        self._rows = kept if rows is None else rows if kept is None else kept[rows]

    def close(self) -> None:
        """Release the bytes of the copies from the KV budget."""
        self._scratch.count_unchecked(-self._counted)
        self._counted = 0


class DenseAttention(AttentionBackend):
    """The backend `dense` in plain torch."""

    name = "dense"
    copies_per_beam = True
    sets_query_rows = True
    tail_tokens = 64
    decode_view = DenseDecode
    prefill_view = TreePrefill
