"""Attention backend of layer-wise offloading, which streams whole layers of KV for every token.

Written to be a strong baseline (LBS sections 2.4, 4.1 with Eq. 1-3, and 5.1): as many layers as fit
stay on the device. The others are fetched two ahead through two buffers, and the next token's first
one while this token's last layer computes. Only KV that the host does not have is written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from beamwright.attention import check_deterministic, make_attention
from beamwright.attention.dense import DenseAttention
from beamwright.attention.protocols import AttentionBackend, AttentionView, DecodeView
from beamwright.attention.tree import TreeAttention
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.kv.segments import Path
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from beamwright_lab.baselines.layerwise.store import LayeredStore
from beamwright_lab.baselines.layerwise.streams import LayerStreams
from beamwright_lab.baselines.layerwise.tail import LayeredTail

# Backends that pack KV into copies, whose layers can be streamed.
Packing = DenseAttention | TreeAttention


class LayerwiseDecode(LayerStreams, DecodeView):
    """A `DecodeView` (one token per row) that streams the layers that do not fit."""

    def __init__(
        self, inner: Packing, store: LayeredStore, paths: Sequence[Path], tail: LayeredTail
    ) -> None:
        super().__init__(store, len(paths), tail)
        self._inner = inner.decode_view(store, paths, tail, self.hold)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to a layer once it has arrived; then its buffer takes the layer after the next.

        Raises:
            CapacityError: if not even two stream buffers fit the budget.
            LinkError: if the link has failed.
        """
        if layer == 0:
            self._tail.make_room()
            self.begin(self.placement.num_real, self.num_layers)
        self.ready(layer)
        context = self._inner.attend(layer, query, key_value, sinks)
        self.done(layer)
        return context

    def keep_rows(self, rows: Tensor) -> None:
        """Continue with these rows; all of them are real, see `set_num_rows`."""
        self._inner.keep_rows(rows)
        kept = [self.placement.rows[row] for row in rows.tolist()]
        self.use_rows(kept, len(kept))

    def set_num_rows(self, num_rows: int) -> None:
        """Count only the first `num_rows` rows as real; the rest pad the batch.

        The KV of padding rows is neither streamed nor counted, and their context is meaningless.
        """
        if num_rows != self.placement.num_real:
            self.use_rows(self.placement.rows, num_rows)

    def close(self) -> None:
        self._inner.close()
        super().close()


class LayerwisePrefill(LayerStreams, AttentionView):
    """An `AttentionView` for prefill, which streams each layer that does not fit once."""

    def __init__(
        self, inner: Packing, store: LayeredStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> None:
        super().__init__(store, len(paths))
        self._num_tokens = sum(lengths)
        self._inner = inner.prefill_view(store, paths, lengths, self.hold)
        store.landing = {}

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to a layer once it has arrived. Raises what `LayerwiseDecode.attend` does."""
        if layer == 0:
            # These few rows may fit although all rows do not: never make more layers resident here.
            self.begin(self._num_tokens, self._store.resident)
        if layer >= self.placement.resident:
            fresh = key_value[: self._num_tokens].contiguous()
            host = self._store.host_memory(fresh.shape)
            transfer = self._submit(Direction.D2H, [Piece(host, fresh, fresh.nbytes)])
            self.placement.storing.append(transfer)
            self._store.landing[layer] = host, transfer
        self.ready(layer)
        context = self._inner.attend(layer, query, key_value, sinks)
        self.done(layer)
        return context

    def close(self) -> None:
        self._inner.close()
        super().close()


class LayerwiseAttention(AttentionBackend):
    """Layer-wise offloading around `dense` (the LBS paper's baseline) or `tree` attention.

    Its views read a `LayeredStore`, which holds the budgets, the link and the counters. The host
    stores a segment once, even if the device has a copy per row (`dense`).

    Raises:
        InputError: for a backend that has no packed copies to stream (`reference`).
    """

    def __init__(self, inner: AttentionBackend) -> None:
        if not isinstance(inner, Packing):
            raise InputError(f"layer-wise offloading needs dense or tree, not {inner.name}")
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self.tested = self._inner = inner

    def make_tail(self, store: Any, group: int = 0, *, stays: bool = False) -> LayeredTail:
        """Return a tail for the rows' newest tokens, whose memory is freed with the rows."""
        return LayeredTail(store, self.tail_tokens)

    def decode_view(
        self, store: LayeredStore, paths: Sequence[Path], tail: LayeredTail
    ) -> LayerwiseDecode:
        """Return a view that decodes one token per row."""
        return LayerwiseDecode(self._inner, store, paths, tail)

    def prefill_view(
        self, store: LayeredStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> LayerwisePrefill:
        """Return a view that prefills `lengths[i]` new tokens after path i."""
        return LayerwisePrefill(self._inner, store, paths, lengths)


def attend_layerwise(
    settings: Settings, backend: AttentionBackend, decoder: Any
) -> LayerwiseAttention:
    """Return layer-wise offloading around torch attention, as Triton kernels cannot read its KV."""
    inner = make_attention(settings.model.attention)
    if settings.model.deterministic:
        check_deterministic(inner, decoder.device, decoder.dtype)
    return LayerwiseAttention(inner)
