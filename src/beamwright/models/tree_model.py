"""TreeModel: a decoder with the KV of a search tree; prefills requests and opens decode sessions.

The sizes of prefill chunks and tails decide where attention's partial sums are split. Results must
not depend on the schedule (docs/concepts/sameness.md), so both sizes are constants, whatever the KV
budget and the batch are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from beamwright.attention.groups import GroupedAttention
from beamwright.attention.protocols import AttentionBackend, StoreMaker
from beamwright.errors import HOST_TIER, DeviceMemoryError
from beamwright.kv.host import HostTier
from beamwright.kv.link import Link, TransferTimeline
from beamwright.kv.pool import (
    BlockPool,
    ByteBudget,
    KVLayout,
    SharedPoolMemory,
    equalise_block_bytes,
)
from beamwright.kv.segments import Path, Segment, append_own_segment, initial_state_segment
from beamwright.kv.states import RowStates, StateLayout, StateTensor
from beamwright.kv.store import SegmentStore
from beamwright.models.decoder import Decoder
from beamwright.models.load import convert_memory_errors
from beamwright.models.prefill import PrefillRequest, prefill_in_batches, recompute, record_source
from beamwright.models.prefill_passes import CapturedPasses, PassInput, Replay, WritingView
from beamwright.models.session import DecodeSession
from beamwright.models.shape import ModelShape
from beamwright.plan.costs import CHUNK_TOKENS


@dataclass(frozen=True)
class HostOptions:
    """Options of one model's host tier, the KV in host memory (`kv.host`)."""

    budget_bytes: int
    link: Link
    # Compute evicted KV again instead of storing it on the host.
    recompute: bool = False
    # Load a segment over the link once, however many copies of it the device gets.
    share_loads: bool = True


def kv_layouts(decoder: Decoder) -> tuple[KVLayout, ...]:
    """Return the KV layout of each of the model's layer groups."""
    dtype, kept = decoder.dtype, decoder.kv_dtype
    layouts = [
        KVLayout(
            len(g.layers),
            g.kv_heads,
            g.head_dim,
            dtype,
            window=g.window,
            softcap=g.softcap,
            kept=kept,
        )
        for g in decoder.shape.kv_layer_groups
    ]
    return equalise_block_bytes(layouts)


def state_layout(decoder: Decoder) -> StateLayout | None:
    """Return the layout of the recurrent layers' states, or None for a model without them."""
    tensors = [
        StateTensor(p.layer, p.kind, p.size, torch.float32 if p.wide else decoder.dtype)
        for p in decoder.shape.states
    ]
    return StateLayout(tensors) if tensors else None


def layer_places(shape: ModelShape) -> dict[int, tuple[int, int]]:
    """Return the place of each layer's KV, (layer group, index in the group), by layer number.

    A layer that reads another layer's KV has the same place as that layer.
    """
    places = {
        layer: (number, place)
        for number, group in enumerate(shape.kv_layer_groups)
        for place, layer in enumerate(group.layers)
    }
    return {**places, **{layer: places[source] for layer, source in shape.shared}}


class TreeModel:
    """The decoder, KV store and attention backend of one model (generator or verifier).

    host: options of the host tier; None keeps all KV on the device.
    make_store: creates a store whose KV is all in the host tier (layer-wise streaming).
    shared: memory that generator and verifier share. This model's KV budget is a part of that
        memory, and `CacheManager.resize` may change the part.
    captured: CUDA graphs of prefill passes; None until `capture` is called.
    tested: the attention backend that the start-up self-test checks.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        kv_budget_bytes: int,
        prefill_chunk_tokens: int = CHUNK_TOKENS,
        *,
        host: HostOptions | None = None,
        log: TransferTimeline | None = None,
        make_store: StoreMaker | None = None,
        shared: SharedPoolMemory | None = None,
    ) -> None:
        shape, self.tested = decoder.shape, backend.tested or backend
        layouts, states = kv_layouts(decoder), state_layout(decoder)
        self._places = layer_places(shape)
        if shape.groups or shape.shared:
            backend = GroupedAttention(backend, self._places)
        self.decoder, self.backend = decoder, backend
        self.budget = ByteBudget(kv_budget_bytes, together=shared)
        pinned = decoder.device.type == "cuda"
        if make_store is not None:
            assert host is not None
            hint, on_device = "raise --host-memory, or lower --n", self.budget
            self.budget = ByteBudget(host.budget_bytes, HOST_TIER, hint)
            pool = BlockPool([layouts[0]], self.budget, pinned=pinned)
            self.store = make_store(pool, decoder.device, host.link, on_device)
        else:
            device = str(decoder.device)
            pool = BlockPool(layouts, self.budget, device, shared=shared, states=states)
            tier = None
            if host is not None:
                hint = "raise --host-memory, or use --evict recompute"
                budget = ByteBudget(host.budget_bytes, HOST_TIER, hint)
                there = BlockPool(layouts, budget, pinned=pinned, states=states)
                tier = HostTier(there, host.link, host.recompute, host.share_loads)
            copies = backend.copies_per_beam
            self.store = SegmentStore(pool, tier, copies_per_beam=copies, log=log)
        self.store.recompute_segments = lambda lost: recompute(self.store, lost, self.prefill)
        self._keeps = backend.prefill_writes_kv and states is None
        self.captured: CapturedPasses | None = None
        self._chunk_tokens = prefill_chunk_tokens

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[Tensor]:
        """Compute and store the KV of each request's tokens; parents must precede children.

        Returns:
            For each request, the final hidden states [tokens, hidden] of the tokens in its `read`.

        Raises:
            CapacityError: if the KV budget cannot hold the new segments.
            DeviceMemoryError: if the device has too little working memory for a single request.
        """
        hidden_states: list[list[Tensor]] = [[] for _ in requests]

        def forward(batch: list[int], chunks: list[Sequence[int]], offset: int) -> None:
            half, hidden = len(batch) // 2, None
            try:
                with convert_memory_errors(f"{len(chunks[0])} tokens cannot be prefilled"):
                    hidden = self._prefill_batch([requests[i] for i in batch], chunks, offset)
            except DeviceMemoryError:  # retry with half the batch; no KV was committed
                self.release()
                if not half:
                    raise
            if hidden is None:
                forward(batch[:half], chunks[:half], offset)
                forward(batch[half:], chunks[half:], offset)
                return
            for i, chunk, states in zip(batch, chunks, hidden, strict=True):
                record_source(requests[i], chunk)
                hidden_states[i].append(states)

        try:
            prefill_in_batches(
                self.store,
                requests,
                self._chunk_tokens,
                forward,
                reads_written=self.store.writes_layers,
            )
        except BaseException:
            for request in requests:  # free blocks reserved for tokens that were not computed
                self.store.trim(request.segment)
            raise
        return [torch.cat(states) if len(states) > 1 else states[0] for states in hidden_states]

    def capture(self, replay: Replay) -> None:
        """Run small prefill passes as CUDA graphs from now on, if the backend stores KV itself."""
        if self._keeps:
            self.captured = CapturedPasses(self.decoder, self.store, self.backend, replay)

    @property
    def stall_s(self) -> float:
        """Seconds that compute waited for transfers of KV and of offloaded weights."""
        offload = self.decoder.offload
        return self.store.stall_s + (0.0 if offload is None else offload.wait_s)

    @property
    def cuda_graph_bytes(self) -> int:
        """Bytes that CUDA graphs of prefill passes reserve, so that no other code can use them."""
        return 0 if self.captured is None else self.captured.replay.cuda_graph_bytes

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream for running this model concurrently with another; None on a CPU.

        It is created once: torch hands out a small pool of streams in turn, so a stream created
        later could be the one on which another model's graphs are captured.
        """
        device = self.decoder.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    def release(self) -> None:
        """Free the CUDA graphs of prefill passes and their memory."""
        if self.captured is not None:
            self.captured.replay.release()

    def _prefill_batch(
        self, requests: list[PrefillRequest], chunks: list[Sequence[int]], offset: int
    ) -> list[Tensor]:
        lengths = [len(chunk) for chunk in chunks]
        starts = accumulate(lengths, initial=0)
        reads = [r.reads(offset, length) for r, length in zip(requests, lengths, strict=True)]
        packed = PassInput(
            paths=[append_own_segment(r.path, r.segment, r.segment.length) for r in requests],
            lengths=lengths,
            token_ids=[token for chunk in chunks for token in chunk],
            positions=[
                request.start + offset + i
                for request, length in zip(requests, lengths, strict=True)
                for i in range(length)
            ],
            read=[start + at for start, read in zip(starts, reads, strict=False) for at in read],
        )
        segments, store = [r.segment for r in requests], self.store
        # Reserve blocks before the view makes working copies, so that a failure leaves no copies.
        if self._keeps and not packed.is_chained:
            slots = store.reserve_slots(segments, lengths)
            hidden = None if self.captured is None else self.captured.hidden(packed, slots)
            if hidden is None:
                view = self.backend.prefill_view(store, packed.paths, lengths, slots)
                hidden = packed.hidden(self.decoder, view)
        else:
            write = store.make_writer(segments, lengths)
            states = None if store.pool.states is None else self._states_of(requests, lengths)
            attended = self.backend.prefill_view(store, packed.paths, lengths)
            writing = WritingView(attended, len(packed.token_ids), write, self._places, states)
            hidden = packed.hidden(self.decoder, writing)
            if states is not None:
                states.commit()
        store.extend_each(segments, lengths)
        return list(hidden.split([len(read) for read in reads]))

    def _states_of(self, requests: Sequence[PrefillRequest], lengths: Sequence[int]) -> RowStates:
        """Return the recurrent states that one prefill pass reads and writes.

        If a request continues its own state, all states are written only when the pass is complete,
        so that a failed pass can be repeated.
        """
        own = [r.segment for r in requests]
        begins = [
            s.group_segments[-1] if s.length else initial_state_segment(r.path)
            for s, r in zip(own, requests, strict=True)
        ]
        begun = any(segment.length for segment in own)
        return self.store.make_row_states(begins, own, lengths, deferred=begun)

    def open_session(self, paths: Sequence[Path], segments: Sequence[Segment]) -> DecodeSession:
        """Start decoding with one row per segment; row i continues path i in segment i.

        A segment may already hold tokens of the row's step. The caller must hold leases on all
        segments that the rows read.
        """
        session = DecodeSession(self.decoder, self.store, self.backend)
        session.arrange_rows([], paths, segments)
        return session
