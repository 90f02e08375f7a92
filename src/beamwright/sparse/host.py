"""HostStore: all KV on the host; the device has what is selected, once for all rows.

AsyncSpade with the host as its cache rank. A token's keys and values of one head cross the link
when a row selects them and no row had them selected for its token before (a hot set, as ShadowKV
and FreeKV have one for each row; `plan.sparse` prices it).
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
    """A store whose pool is the host's, beside a device that attention computes on.

    device_budget: bytes of what is there of the segments for now.
    """

    writes_layers = False
    _gathered: torch.Tensor

    def __init__(
        self, pool: BlockPool, device: torch.device, link: Link, device_budget: ByteBudget
    ) -> None:
        super().__init__(pool)
        self.link, self.device_budget, self.compute_device = link, device_budget, device
        self.tiers = {"device": device_budget, "host": pool.budget}

    def writer(self, segments: Sequence[Segment], lengths: Sequence[int]) -> Write:
        """What a pass writes is gathered on the device, and appended when the pass is over."""
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
    """A `HostedStore` of which the device has, of each layer, the union of what rows selected last.

    Hot sets: ids of (token, head), in order, and values [id, K or V, head_dim].
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
        """What a rank brought while layers were computed is not waited for."""
        counts = self.counts
        beside = max(0.0, counts.rank_s - counts.rank_waited_s)
        return super().stall_s + self._waited_s - min(counts.rank_link_s, beside)

    def append(
        self,
        segments: Sequence[Segment],
        key_values: Sequence[torch.Tensor],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Tokens go to the host as they are stored; raises what `SegmentStore.append` does."""
        on_host = [torch.empty_like(values, device="cpu") for values in key_values]
        pairs = zip(on_host, key_values, strict=True)
        pieces = [Piece(there, here.contiguous(), here.nbytes) for there, here in pairs]
        self._cross(Direction.D2H, pieces)
        starts = [segment.length for segment in segments]
        super().append(segments, on_host, lengths)
        for segment, first in zip(segments, starts, strict=True):
            self._forget(segment, first)

    def free(self, segment: Segment) -> None:
        """With the last one goes what the device still has of those that were selected."""
        super().free(segment)
        if not self.num_segments:
            self._charge(-sum(len(ids) for ids, _ in self._hot))
            self._hot = list(self._none)

    def gather(self, segment: Segment, visible: int, copy: int = 0) -> torch.Tensor:
        """On the device: what reads all of a path has it cross the link."""
        held = super().gather(segment, visible, copy).contiguous()
        found = torch.empty_like(held, device=self.compute_device)
        self._cross(Direction.H2D, [Piece(found, held, held.nbytes)])
        return found

    def keys_of(self, segment: Segment, visible: int) -> torch.Tensor:
        """On the host: nothing crosses the link to be scored."""
        return super().gather(segment, visible)[:, 0]

    def fetch(self, wanted: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """What of it is not on the device crosses the link once for all rows, in one copy.

        Raises:
            CapacityError: if the device's budget is too small for what is selected.
        """
        kv_heads, found, missing = self.pool.layout.num_kv_heads, [], []
        with self._one_at_a_time:  # the rank, and a layer that does not wait for it
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
                found.append((layer, asked, ids, values, there))
            pack = torch.cat(missing)
            brought = torch.empty_like(pack, device=self.compute_device)
            pieces = [Piece(brought, pack, pack.nbytes)]
            self.counts.rank_link_s += self._cross(Direction.H2D, pieces)
            fetched = {}
            of_layers = brought.split([len(each) for each in missing])
            for (layer, asked, ids, values, there), fresh in zip(found, of_layers, strict=True):
                values[~there] = fresh
                self._charge(len(ids) - len(self._hot[layer][0]))
                self._hot[layer] = ids, values
                fetched[layer] = [values[own].permute(3, 0, 1, 2, 4) for own in asked]
        return fetched

    def _of_ids(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Keys and values [id, K or V, head_dim], on the host."""
        kv_heads, size = self.pool.layout.num_kv_heads, self.pool.block_tokens
        slots, heads = ids // kv_heads, ids % kv_heads
        return self.pool.storage[slots // size, layer, :, slots % size, heads]

    def _charge(self, num_more: int) -> None:
        layout = self.pool.layout
        num_bytes = num_more * 2 * layout.head_dim * layout.dtype.itemsize
        if num_bytes > 0:
            self.device_budget.charge(num_bytes, "what --sparse selects")
        else:
            self.device_budget.release(-num_bytes)

    def _forget(self, segment: Segment, first: int) -> None:
        """What was in the places of tokens from here on is no longer."""
        kv_heads = self.pool.layout.num_kv_heads
        slots = self.slots_of(segment, first, segment.length)
        ids = (slots[:, None] * kv_heads + torch.arange(kv_heads)).flatten().to(self.compute_device)
        for layer, (held_ids, held) in enumerate(self._hot):
            kept = ~torch.isin(held_ids, ids)
            self._hot[layer] = held_ids[kept], held[kept]
            self._charge(len(self._hot[layer][0]) - len(held_ids))

    def _cross(self, direction: Direction, pieces: Sequence[Piece]) -> float:
        """Seconds of it."""
        if not any(piece.num_bytes for piece in pieces):
            return 0.0
        seconds = self.link.wait([self.link.submit(direction, "select", pieces)])
        self._waited_s += seconds
        return seconds
