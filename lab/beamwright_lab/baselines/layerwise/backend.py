"""Layer-wise offloading, the baseline: token by token, whole layers of KV streamed for every token.

As strong as it can be written: as many layers resident as fit, the others fetched two ahead through
two buffers, the next token's first one while this token's last one computes, and only KV that is
not on the host is written back. LBS section 2.4, 4.1 (Eq. 1-3) and 5.1.
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

# What makes packed copies, whose layers can be streamed.
Packing = DenseAttention | TreeAttention


class LayerwiseDecode(LayerStreams, DecodeView):
    """A `DecodeView`, one token per row; layers that do not fit are streamed for each token."""

    def __init__(
        self, inner: Packing, store: LayeredStore, paths: Sequence[Path], tail: LayeredTail
    ) -> None:
        super().__init__(store, len(paths), tail)
        self._inner = inner.decode_view(store, paths, tail, self.hold)

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to a layer that has arrived; its buffer takes the one after the next.

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
        """All rows kept count as real, see `count_rows`."""
        self._inner.keep_rows(rows)
        kept = [self.placement.rows[row] for row in rows.tolist()]
        self.use_rows(kept, len(kept))

    def count_rows(self, num_rows: int) -> None:
        """Only the first `num_rows` rows are real; the rest pad the batch.

        The KV of padding rows is neither streamed nor counted, and their context is meaningless.
        """
        if num_rows != self.placement.num_real:
            self.use_rows(self.placement.rows, num_rows)

    def close(self) -> None:
        self._inner.close()
        super().close()


class LayerwisePrefill(LayerStreams, AttentionView):
    """An `AttentionView`; each streamed layer of the paths crosses the link once."""

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
        """Raises what `LayerwiseDecode.attend` does."""
        if layer == 0:
            # A batch of a few rows that would fit says nothing about all the others.
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
    """Layer-wise offloading around `dense` (the LBS paper's baseline) or `tree`.

    Its views read a `LayeredStore`, which holds the budgets, the link and what is counted.

    The host stores a segment once whatever the device layout is.

    Raises:
        InputError: for a backend that has no packed copies to stream (`reference`).
    """

    def __init__(self, inner: AttentionBackend) -> None:
        if not isinstance(inner, Packing):
            raise InputError(f"layer-wise offloading needs dense or tree, not {inner.name}")
        self.name, self.tail_tokens = inner.name, inner.tail_tokens
        self.tested = self._inner = inner

    def make_tail(self, store: Any, group: int = 0, *, stays: bool = False) -> LayeredTail:
        """Its memory never outlives the rows."""
        return LayeredTail(store, self.tail_tokens)

    def decode_view(
        self, store: LayeredStore, paths: Sequence[Path], tail: LayeredTail
    ) -> LayerwiseDecode:
        """A view for one token per row."""
        return LayerwiseDecode(self._inner, store, paths, tail)

    def prefill_view(
        self, store: LayeredStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> LayerwisePrefill:
        """A view for `lengths[i]` new tokens after path i."""
        return LayerwisePrefill(self._inner, store, paths, lengths)


def attend_layerwise(
    settings: Settings, backend: AttentionBackend, decoder: Any
) -> LayerwiseAttention:
    """Layer-wise offloading around plain torch: kernels read the pool themselves."""
    inner = make_attention(settings.model.attention)
    if settings.model.deterministic:
        check_deterministic(inner, decoder.device, decoder.dtype)
    return LayerwiseAttention(inner)
