"""Layer-wise offloading, the baseline: token by token, whole layers of KV streamed for every token.

As strong as it can be written: as many layers resident as fit, the others fetched two ahead through
two buffers, the next token's first one while this token's last one computes, and only KV that is
not at home is written back. LBS section 2.4, 4.1 (Eq. 1-3) and 5.1. Knows one link and one budget;
which beams are decoded is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from beamwright.attention.dense import DenseAttention
from beamwright.attention.device_tail import DeviceTail
from beamwright.attention.offload import NUM_BUFFERS, Offload, as_array
from beamwright.attention.streamed_tail import StreamedTail
from beamwright.attention.streams import LayerStreams
from beamwright.attention.tree import TreeAttention
from beamwright.errors import InputError
from beamwright.kv import (
    BlockPool,
    ByteBudget,
    KVLayout,
    Landing,
    LayeredStore,
    LayeredTail,
    Link,
    Path,
    Piece,
    ScratchMeter,
    SegmentStore,
    StreamLink,
    TailBuffer,
)
from beamwright.protocols import AttentionBackend


class LayerwiseDecode:
    """One token per row; layers that do not fit are streamed for each token."""

    def __init__(
        self,
        inner: DenseAttention | TreeAttention,
        offload: Offload,
        store: SegmentStore,
        paths: Sequence[Path],
        tail: TailBuffer,
    ) -> None:
        self._offload = offload
        self._streams = LayerStreams(offload, store.pool.layout, len(paths))
        self._tail = _streamed_tail(tail, self._streams)
        self._streams.tail = self._tail
        self._inner = inner.decode_view(store, paths, self._tail, self._streams.hold)
        offload.home.note(self._streams.copies, self._streams.num_layers)
        offload.home.start_decoding()

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`.

        Raises:
            CapacityError: if not even two stream buffers fit the budget.
            LinkError: if the link has failed.
        """
        streams = self._streams
        if layer == 0:
            streams.begin(streams.num_real * streams.token_bytes, streams.num_layers)
            self._offload.tokens += 1
            self._offload.streamed_layers += streams.num_layers - streams.resident
        streams.ready(layer)
        context = self._inner.attend(layer, query, key_value)
        streams.done(
            layer,
            another_token=layer + NUM_BUFFERS == streams.num_layers
            and self._tail.length + 1 < self._tail.capacity
            and streams.next_is_alike(),
        )
        return context

    def keep_rows(self, rows: torch.Tensor) -> None:
        """See `protocols.DecodeView`. All rows kept count as real, see `count_rows`."""
        self._inner.keep_rows(rows)
        kept = [self._streams.rows[row] for row in rows.tolist()]
        self._streams.use_rows(kept, len(kept))

    def count_rows(self, num_rows: int) -> None:
        """Only the first `num_rows` rows are real; the rest pad the batch.

        The KV of padding rows is neither streamed nor counted, and their context is meaningless.
        """
        if num_rows != self._streams.num_real:
            self._streams.use_rows(self._streams.rows, num_rows)

    def drop_rows(self, rows: Sequence[int]) -> None:
        """See `protocols.DecodeView`. Only packed copies are read, so nothing depends on it."""

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._inner.close()
        self._streams.close()


class LayerwisePrefill:
    """Several new tokens per path; each streamed layer of the paths crosses the link once."""

    def __init__(
        self,
        inner: DenseAttention | TreeAttention,
        offload: Offload,
        store: SegmentStore,
        paths: Sequence[Path],
        lengths: Sequence[int],
    ) -> None:
        self._streams = LayerStreams(offload, store.pool.layout, len(paths))
        self._inner = inner.prefill_view(store, paths, lengths, self._streams.hold)
        self._num_tokens = sum(lengths)
        self._layered = store if isinstance(store, LayeredStore) else None
        if self._layered is not None:
            self._layered.forget_landings()
        offload.home.note(self._streams.copies, self._streams.num_layers)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `protocols.AttentionView`. Raises what `LayerwiseDecode.attend` does."""
        streams = self._streams
        num_bytes = self._num_tokens * streams.token_bytes
        if layer == 0:
            # A batch of a few rows that would fit says nothing about all the others.
            streams.begin(num_bytes, streams.resident_before)
        if layer >= streams.resident:
            self._store(layer, key_value[: self._num_tokens], num_bytes)
        streams.ready(layer)
        context = self._inner.attend(layer, query, key_value)
        streams.done(layer, another_token=False)
        return context

    def _store(self, layer: int, fresh: torch.Tensor, num_bytes: int) -> None:
        """Send a streamed layer's new tokens home; one memory gets them when they are appended."""
        if self._layered is None:
            array = as_array(fresh)
            self._streams.store([Piece(np.empty_like(array), array, num_bytes)])
            return
        fresh = fresh.contiguous()
        home = self._layered.home_memory(fresh.shape)
        transfer = self._streams.store([Piece(home, fresh, num_bytes)])
        self._layered.land(layer, Landing(home, transfer))

    def close(self) -> None:
        """See `protocols.AttentionView`."""
        self._inner.close()
        self._streams.close()


def _streamed_tail(tail: TailBuffer, streams: LayerStreams) -> StreamedTail | DeviceTail:
    if isinstance(tail, LayeredTail):
        return DeviceTail(tail, streams)
    return StreamedTail(tail, streams)


class LayerwiseAttention:
    """Layer-wise offloading around `dense` (the LBS paper's baseline) or `tree`.

    The store that it is given (`make_store`) is the host tier; `budget` is the device's, and holds
    the resident layers and the stream buffers while a view is open. Over a `StreamLink` the tiers
    are a device and pinned memory; else both are CPU memory.

    copies_per_beam: False, because at home a segment stands once whatever the device layout is.

    Raises:
        InputError: for a backend that has no packed copies to stream (`reference`).
    """

    copies_per_beam = False

    def __init__(self, inner: AttentionBackend, budget: ByteBudget, link: Link) -> None:
        if not isinstance(inner, DenseAttention | TreeAttention):
            raise InputError(f"layer-wise offloading needs dense or tree, not {inner.name}")
        self.name = inner.name
        self.tail_tokens = inner.tail_tokens
        self.budget = budget
        self._inner, self._link = inner, link
        self._offload = Offload(budget, link)

    @property
    def stall_s(self) -> float:
        """Seconds in which compute waited for the link."""
        self._offload.order([])
        return self._offload.stall_s

    @property
    def tokens(self) -> int:
        """Decoded tokens per row (forward passes of decode views)."""
        return self._offload.tokens

    @property
    def streamed_layers(self) -> int:
        """Layers streamed, summed over `tokens`."""
        return self._offload.streamed_layers

    @property
    def discarded_bytes(self) -> int:
        """Host-to-device bytes fetched ahead that no token used."""
        return self._offload.discarded_bytes

    @property
    def padding(self) -> ScratchMeter:
        """Device bytes of resident layers and stream buffers that hold no token of a real row."""
        return self._offload.padding

    def make_store(
        self, layout: KVLayout, budget: ByteBudget, device: torch.device
    ) -> SegmentStore:
        """The host tier of a model that computes on `device`."""
        if not isinstance(self._link, StreamLink):
            return SegmentStore(BlockPool(layout, budget))
        pool = BlockPool(layout, budget, pinned=device.type == "cuda")
        return LayeredStore(pool, device, self._link)

    def reset(self) -> None:
        """Start another run: forget what is resident, and all counts. No view may be open."""
        self._offload = Offload(self.budget, self._link)

    def decode_view(
        self, store: SegmentStore, paths: Sequence[Path], tail: TailBuffer
    ) -> LayerwiseDecode:
        """A view for one token per row."""
        return LayerwiseDecode(self._inner, self._offload, store, paths, tail)

    def prefill_view(
        self, store: SegmentStore, paths: Sequence[Path], lengths: Sequence[int]
    ) -> LayerwisePrefill:
        """A view for `lengths[i]` new tokens after path i."""
        return LayerwisePrefill(self._inner, self._offload, store, paths, lengths)
