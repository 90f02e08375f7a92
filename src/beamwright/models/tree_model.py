"""TreeModel: a decoder whose KV lives in tree segments. Batched prefill and decode sessions.

Chunk and tail sizes are constants, never functions of the budget or of the batch: they set where
attention's partial sums are cut, and results must not depend on the schedule
(docs/architecture.md, "Sameness").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from beamwright.errors import DeviceMemoryError
from beamwright.kv.host_tier import HostTier
from beamwright.kv.link import KVLog, Link
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout, ScratchMeter
from beamwright.kv.segments import Path, Segment, visible_path
from beamwright.kv.store import SegmentStore
from beamwright.models.decoder import Decoder, padded_rows
from beamwright.models.device_memory import is_out_of_memory
from beamwright.models.prefill import (
    PREFILL_CHUNK_TOKENS,
    PrefillRequest,
    prefill_in_batches,
    recompute_levels,
    remember,
)
from beamwright.models.session import DecodeSession
from beamwright.protocols import AttentionBackend, AttentionView
from beamwright.sections import Victims


@dataclass(frozen=True)
class HostOptions:
    """The host tier of one model: see `kv.HostTier`."""

    budget_bytes: int
    link: Link
    recompute: bool = False
    share_loads: bool = True
    victims: Victims = "tree"


@dataclass(frozen=True)
class SharedBytes:
    """KV memory that two models share. used: by both."""

    total_bytes: int
    used: ScratchMeter


StoreMaker = Callable[[KVLayout, ByteBudget, torch.device], SegmentStore]
"""A store of KV of this layout and budget, for a model that computes on this device."""


class TreeModel:
    """Decoder + segment store + attention backend of one model (generator or verifier).

    host: the host tier; None if all KV is on the device. make_store: makes another store than that
    of a device and its host tier. shared: the memory that this model's budget is a part of, where
    `CacheManager.resize` may change how large a part.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        kv_budget_bytes: int,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
        *,
        host: HostOptions | None = None,
        log: KVLog | None = None,
        make_store: StoreMaker | None = None,
        shared: SharedBytes | None = None,
    ) -> None:
        shape = decoder.shape
        layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, decoder.dtype)
        self.decoder = decoder
        self.backend = backend
        self.budget = ByteBudget(kv_budget_bytes, together=None if shared is None else shared.used)
        if make_store is not None:
            self.store = make_store(layout, self.budget, decoder.device)
        else:
            self.store = SegmentStore(
                BlockPool(
                    layout,
                    self.budget,
                    str(decoder.device),
                    most_bytes=None if shared is None else shared.total_bytes,
                ),
                _host_tier(layout, host, pinned=decoder.device.type == "cuda"),
                copies_per_beam=backend.copies_per_beam,
                log=log,
            )
        self.store.recompute_segments = self._recompute
        self._chunk_tokens = prefill_chunk_tokens

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[torch.Tensor]:
        """Compute and store the KV of each request's tokens.

        Returns:
            Final hidden states [tokens, embed_dim] of the tokens that each request reads.

        Raises:
            CapacityError: if the KV budget cannot hold the new segments; DeviceMemoryError: if the
                device has no working memory even for one request.
        """
        found: list[list[torch.Tensor]] = [[] for _ in requests]

        def forward(batch: list[int], chunks: list[Sequence[int]], offset: int) -> None:
            hidden = self._attempt([requests[i] for i in batch], chunks, offset)
            if hidden is None:
                half = len(batch) // 2
                if not half:
                    raise DeviceMemoryError(f"{len(chunks[0])} tokens cannot be prefilled")
                forward(batch[:half], chunks[:half], offset)
                forward(batch[half:], chunks[half:], offset)
                return
            for i, chunk, states in zip(batch, chunks, hidden, strict=True):
                remember(requests[i], chunk)
                found[i].append(states)

        prefill_in_batches(self.store, requests, self._chunk_tokens, forward)
        return [torch.cat(states) if len(states) > 1 else states[0] for states in found]

    def _recompute(self, lost: Sequence[Segment]) -> None:
        """Compute the KV of evicted segments again, level by level."""
        levels = recompute_levels(lost)
        for segment in lost:
            segment.source = None
        for level in levels:
            self.prefill(level)

    def _attempt(
        self, requests: list[PrefillRequest], chunks: list[Sequence[int]], offset: int
    ) -> list[torch.Tensor] | None:
        """None if the device's memory does not suffice; nothing has been written then."""
        try:
            return self._prefill_batch(requests, chunks, offset)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _prefill_batch(
        self, requests: list[PrefillRequest], chunks: list[Sequence[int]], offset: int
    ) -> list[torch.Tensor]:
        lengths = [len(chunk) for chunk in chunks]
        paths = [visible_path(r.path, r.segment, r.segment.length) for r in requests]
        token_ids = [token for chunk in chunks for token in chunk]
        positions = [
            request.start + offset + i
            for request, length in zip(requests, lengths, strict=True)
            for i in range(length)
        ]
        total = len(token_ids)
        padding = padded_rows(total) - total
        device = self.decoder.device
        reads = [r.reads(offset, length) for r, length in zip(requests, lengths, strict=True)]
        counts = [len(read) for read in reads]
        layout = self.store.pool.layout
        key_values = self.decoder.weights.embedding.new_empty(
            total, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim
        )
        view = _Recording(self.backend.prefill_view(self.store, paths, lengths), key_values)
        try:
            hidden = self.decoder.hidden(
                torch.tensor(token_ids + token_ids[:1] * padding, device=device),
                torch.tensor(positions + positions[:1] * padding, device=device),
                view,
                None if sum(counts) == total else _packed(reads, lengths, device),
            )
        finally:
            view.close()
        self.store.append([r.segment for r in requests], key_values.split(lengths))
        return list(hidden[: sum(counts)].split(counts))

    def open_session(
        self, paths: Sequence[Path], segments: Sequence[Segment], *, stays: bool = False
    ) -> DecodeSession:
        """Start decoding: row i goes on with segment i behind path i. stays: see `DecodeSession`.

        The segments may hold tokens of a row's step already. Whoever decodes holds what is read.
        """
        session = DecodeSession(self.decoder, self.store, self.backend, stays=stays)
        session.arrange([], paths, segments)
        return session


def _packed(
    reads: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Where tokens that are read are among the packed ones, padded to a multiple of 8 rows."""
    starts = accumulate(lengths, initial=0)
    at = [start + token for start, read in zip(starts, reads, strict=False) for token in read]
    at += [0] * (padded_rows(len(at)) - len(at))
    return torch.tensor(at, device=device)


def _host_tier(layout: KVLayout, host: HostOptions | None, *, pinned: bool) -> HostTier | None:
    if host is None:
        return None
    budget = ByteBudget(
        host.budget_bytes, "host KV budget", "raise --host-memory, or use --evict recompute"
    )
    pool = BlockPool(layout, budget, pinned=pinned)
    return HostTier(pool, host.link, host.recompute, host.share_loads, host.victims)


class _Recording:
    """An attention view that also keeps every layer's keys and values, but those of padding.

    key_values: to be written, [tokens, layers, 2, kv_heads, head_dim].
    """

    def __init__(self, view: AttentionView, key_values: torch.Tensor) -> None:
        self._view, self._key_values = view, key_values

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        self._key_values[:, layer] = key_value[: len(self._key_values)]
        context: torch.Tensor = self._view.attend(layer, query, key_value)
        return context

    def close(self) -> None:
        self._view.close()
