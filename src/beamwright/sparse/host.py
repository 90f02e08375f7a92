"""HostStore: keeps all KV in host memory, and caches the selected tokens on the device.

This is AsyncSpade with the host as its cache rank. Rows share the cache. The keys and values of a
token and KV head cross the link if a row selects them that no row selected for its previous token.
ShadowKV and FreeKV have such a hot set too, but one per row. `plan.sparse` estimates the bytes and
time of this store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from beamwright.kv.link import Link
from beamwright.kv.pool import BlockPool, ByteBudget
from beamwright.kv.segments import Segment
from beamwright.kv.store import SegmentStore, Write
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction


class HostedStore(SegmentStore):
    """Segment store with its blocks in host memory, while attention computes on another device.

    device_budget: the budget for copies of KV on the device.
    """

    writes_layers = False
    # KV of the current prefill pass [tokens, layers, 2, kv_heads, head_dim].
    _gathered: torch.Tensor

    def __init__(
        self, pool: BlockPool, device: torch.device, link: Link, device_budget: ByteBudget
    ) -> None:
        super().__init__(pool)
        self.link, self.device_budget, self.compute_device = link, device_budget, device
        self.tiers = {"device": device_budget, "host": pool.budget}

    def make_writer(self, segments: Sequence[Segment], lengths: Sequence[int]) -> Write:
        """Return a function that collects the KV of a prefill pass on the device.

        `extend_each` appends it to the segments after the pass.
        """
        layout, total = self.pool.layout, sum(lengths)
        size = total, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim
        self._gathered = torch.empty(size, dtype=layout.dtype, device=self.compute_device)

        def write(group: int, place: int | slice, key_value: torch.Tensor) -> None:
            self._gathered[:, place] = key_value

        return write

    def extend_each(self, segments: Sequence[Segment], lengths: Sequence[int]) -> None:
        gathered = self._gathered
        del self._gathered
        self.append(segments, [gathered], lengths)


class HostStore(HostedStore):
    """Host-memory store that caches, for each layer, the tokens that any row selected last.

    These tokens are the layer's hot set. It consists of sorted ids of (token, KV head) pairs, and
    their keys and values [id, K or V, head_dim].
    """

    def __init__(
        self, pool: BlockPool, device: torch.device, link: Link, device_budget: ByteBudget
    ) -> None:
        super().__init__(pool, device, link, device_budget)
        layout = pool.layout
        none = torch.empty(0, dtype=torch.long, device=device)
        nothing = torch.empty(0, 2, layout.head_dim, dtype=layout.dtype, device=device)
        self._none = [(none, nothing) for _ in range(layout.num_layers)]
        self._hot = list(self._none)
        self._waited_s, self._one_at_a_time = 0.0, threading.Lock()

    @property
    def stall_s(self) -> float:
        """Seconds that compute has waited for transfers of this KV.

        Transfers of the cache rank that overlapped with the compute of other layers are not
        counted.
        """
        counts = self.counts
        beside = max(0.0, counts.rank_s - counts.rank_waited_s)
        return super().stall_s + self._waited_s - min(counts.rank_link_s, beside)

    def append(
        self,
        segments: Sequence[Segment],
        key_values: Sequence[torch.Tensor],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Copy the KV of new tokens to the host, and append it to their segments there.

        Raises:
            CapacityError: if the host's budget is exhausted. LinkError: if the link has failed.
        """
        on_host = [torch.empty_like(values, device="cpu") for values in key_values]
        pairs = zip(on_host, key_values, strict=True)
        pieces = [Piece(there, here.contiguous(), here.nbytes) for there, here in pairs]
        self._cross(Direction.D2H, pieces)
        starts = [segment.length for segment in segments]
        super().append(segments, on_host, lengths)
        for segment, first in zip(segments, starts, strict=True):
            self._forget(segment, first)

    def free(self, segment: Segment) -> None:
        """Free the segment. After the last one, also empty the hot sets on the device."""
        super().free(segment)
        if not self.num_segments:
            self._charge(-sum(len(ids) for ids, _ in self._hot))
            self._hot = list(self._none)

    def gather(self, segment: Segment, visible: int, copy: int = 0) -> torch.Tensor:
        """Copy the KV of a segment's first `visible` tokens to the device, and return it."""
        held = super().gather(segment, visible, copy).contiguous()
        on_device = torch.empty_like(held, device=self.compute_device)
        self._cross(Direction.H2D, [Piece(on_device, held, held.nbytes)])
        return on_device

    def keys_of(self, segment: Segment, visible: int) -> torch.Tensor:
        """Return the keys of a segment's first `visible` tokens, on the host.

        The keys are scored on the host, so that none crosses the link for scoring.
        """
        return super().gather(segment, visible)[:, 0]

    def fetch(self, wanted: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """Return the keys and values of selected tokens on the device, and make them the hot sets.

        Tokens that the hot sets lack cross the link once for all rows, in one copy.

        wanted: for each layer, slots in the pool, one tensor per class of rows that select equally
            many tokens.

        Raises:
            CapacityError: if the device's budget is too small for the selected tokens.
        """
        kv_heads, lookups, missing = self.pool.layout.num_kv_heads, [], []
        with self._one_at_a_time:  # the cache rank's thread and the computing thread may both fetch
            for layer, slots in wanted.items():
                held_ids, held = self._hot[layer]
                each = [one * kv_heads + self.heads_of(one) for one in slots]
                ids, places = torch.cat([one.flatten() for one in each]).unique(return_inverse=True)
                values = held.new_empty(len(ids), *held.shape[1:])
                there = torch.zeros_like(ids, dtype=torch.bool)
                if len(held_ids):
                    at = torch.searchsorted(held_ids, ids).clamp_max(len(held_ids) - 1)
                    there = held_ids[at] == ids
                    values[there] = held[at[there]]
                missing.append(self._of_ids(layer, ids[~there].cpu()))
                of_each = places.split([one.numel() for one in each])
                asked = [p.view(one.shape) for p, one in zip(of_each, each, strict=True)]
                lookups.append((layer, asked, ids, values, there))
            pack = torch.cat(missing)
            brought = torch.empty_like(pack, device=self.compute_device)
            pieces = [Piece(brought, pack, pack.nbytes)]
            self.counts.rank_link_s += self._cross(Direction.H2D, pieces)
            fetched = {}
            of_layers = brought.split([len(each) for each in missing])
            for (layer, asked, ids, values, there), fresh in zip(lookups, of_layers, strict=True):
                values[~there] = fresh
                self._charge(len(ids) - len(self._hot[layer][0]))
                self._hot[layer] = ids, values
                fetched[layer] = [values[own].permute(3, 0, 1, 2, 4) for own in asked]
        return fetched

    def _of_ids(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the host's KV [id, K or V, head_dim]. An id is slot * kv_heads + head."""
        kv_heads, size = self.pool.layout.num_kv_heads, self.pool.block_tokens
        slots, heads = ids // kv_heads, ids % kv_heads
        return self.pool.storage[slots // size, layer, :, slots % size, heads]

    def _charge(self, num_more: int) -> None:
        layout = self.pool.layout
        num_bytes = num_more * 2 * layout.head_dim * layout.dtype.itemsize
        if num_bytes > 0:
            self.device_budget.charge(num_bytes, "the selection of --sparse")
        else:
            self.device_budget.release(-num_bytes)

    def _forget(self, segment: Segment, first: int) -> None:
        """Remove the slots of a segment's tokens from number `first` on from the hot sets.

        These slots have just been written, so a hot set may hold the values of other tokens that
        used them before.
        """
        kv_heads = self.pool.layout.num_kv_heads
        slots = self.slots_of(segment, first, segment.length)
        ids = (slots[:, None] * kv_heads + torch.arange(kv_heads)).flatten().to(self.compute_device)
        for layer, (held_ids, held) in enumerate(self._hot):
            kept = ~torch.isin(held_ids, ids)
            self._hot[layer] = held_ids[kept], held[kept]
            self._charge(len(self._hot[layer][0]) - len(held_ids))

    def _cross(self, direction: Direction, pieces: Sequence[Piece]) -> float:
        """Move the pieces over the link, wait for them, and return the seconds that it took."""
        if not any(piece.num_bytes for piece in pieces):
            return 0.0
        seconds = self.link.wait([self.link.submit(direction, "select", pieces)])
        self._waited_s += seconds
        return seconds
