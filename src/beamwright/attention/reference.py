"""Backend `reference`: slow and simple attention, with which tests compare the other backends.

Every row gathers the KV of its whole path and computes one plain softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beamwright.attention.protocols import AttentionBackend, AttentionView, DecodeView
from beamwright.kv.pool import KVLayout
from beamwright.kv.segments import Path
from beamwright.kv.store import SegmentStore
from beamwright.kv.tails import Tail


def gather_path(store: SegmentStore, path: Path, layer: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [tokens, kv_heads, head_dim] of a whole path in one layer."""
    layout = store.kv.layout
    empty = torch.zeros(
        (2, 0, layout.num_kv_heads, layout.head_dim),
        dtype=layout.dtype,
        device=store.kv.storage.device,
    )
    parts = [store.gather(part.segment, part.visible)[layer] for part in path]
    both = torch.cat([empty, *parts], dim=1)
    return both[0], both[1]


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: KVLayout, sinks: Tensor | None = None
) -> Tensor:
    """Compute causal attention of the last positions, and return their context.

    Args:
        query: [tokens, heads, head_dim], the queries of the *last* tokens of `key`.
        key, value: [all tokens, kv_heads, head_dim].
        sinks: one additional score per head [heads] that joins the softmax without a value.
    """
    num_new, num_heads, head_dim = query.shape
    group = num_heads // key.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = key.to(wide).repeat_interleave(group, dim=1)
    values = value.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), keys) / head_dim**0.5
    if layout.softcap is not None:
        scores = layout.softcap * torch.tanh(scores / layout.softcap)
    at = torch.arange(key.shape[0], device=query.device)
    distance = at[-num_new:].unsqueeze(1) - at
    visible = distance >= 0
    if layout.window is not None:
        visible &= distance < layout.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(-1, 1, 1).expand(-1, num_new, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


class ReferenceDecode(DecodeView):
    """A `DecodeView` that computes each row separately."""

    def __init__(self, store: SegmentStore, paths: Sequence[Path], tail: Tail) -> None:
        self._store, self._paths, self._tail = store, list(paths), tail
        self._live = [True] * len(paths)
        self._rows: Sequence[int] = range(len(paths))

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self._tail.write(layer, key_value)
        tail_keys, tail_values = self._tail.read(layer)
        counts = (self._tail.places + 1).tolist()
        out = torch.zeros_like(query)
        for row, of in enumerate(self._rows):
            if not self._live[of]:
                continue
            keys, values = gather_path(self._store, self._paths[of], layer)
            keys = torch.cat([keys, tail_keys[row, :, : counts[row]].transpose(0, 1)])
            values = torch.cat([values, tail_values[row, :, : counts[row]].transpose(0, 1)])
            layout = self._store.kv.layout
            out[row] = plain_attention(query[row : row + 1], keys, values, layout, sinks)[0]
        return out

    def keep_rows(self, rows: Tensor) -> None:
        self._paths = [self._paths[row] for row in rows.tolist()]
        self._live = [self._live[row] for row in rows.tolist()]
        self.set_query_rows(None)

    def set_query_rows(self, rows: Tensor | None) -> None:
        self._rows = range(len(self._paths)) if rows is None else rows.tolist()

    def deactivate_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._live[row] = False


class ReferencePrefill(AttentionView):
    """A prefill view over several new tokens per path, packed path after path."""

    def __init__(self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]) -> None:
        self._store, self._paths, self._lengths = store, list(paths), list(lengths)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.zeros_like(query)
        first = 0
        for path, length in zip(self._paths, self._lengths, strict=True):
            own = slice(first, first + length)
            keys, values = gather_path(self._store, path, layer)
            keys = torch.cat([keys, key_value[own, 0]])
            values = torch.cat([values, key_value[own, 1]])
            out[own] = plain_attention(query[own], keys, values, self._store.kv.layout, sinks)
            first += length
        return out


class ReferenceAttention(AttentionBackend):
    """The backend `reference`."""

    name = "reference"
    sets_query_rows = True
    tail_tokens = 64
    decode_view = ReferenceDecode
    prefill_view = ReferencePrefill
