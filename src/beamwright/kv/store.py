"""SegmentStore: the KV cache with tensors. It writes, reads and copies the KV of segments.

`CacheManager`, its base, decides which segments are on the device. Attention in a group of layers
reads segments through a `KVReader`. In a model with one group, the store itself is that reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from beamwright.kv.cache import CacheManager
from beamwright.kv.host import HostTier
from beamwright.kv.link import TransferTimeline
from beamwright.kv.pool import BlockPool, ByteBudget, KVBlockView, ScratchMeter
from beamwright.kv.segments import Segment
from beamwright.kv.states import RowStates, StateTables
from beamwright.kv.streams import send_to_device

_COPIED_BYTES = 2**24  # bytes that a copy within the device moves at a time
# Function that writes KV. Arguments: number of the group of layers; index of a layer in the group,
# or slice(None) for all its layers; KV of the new tokens.
Write = Callable[[int, int | slice, torch.Tensor], None]


class KVReader:
    """Reader of the KV of one group of layers.

    kv: view of the pool's blocks as KV of this group.
    compute_device: device on which attention works, with its temporary copies of KV.
    scratch: meter of the bytes of these copies.
    """

    def __init__(
        self, kv: KVBlockView, compute_device: torch.device, scratch: ScratchMeter
    ) -> None:
        self.kv, self.compute_device, self.scratch = kv, compute_device, scratch

    def gather(self, segment: Segment, visible: int, copy: int = 0) -> torch.Tensor:
        """Return KV [layers, 2, visible, kv_heads, head_dim] of a segment's first `visible` tokens.

        copy: index of the device copy to read, if every row has its own.
        """
        count = segment.blocks_for(visible)
        held = segment.copies[min(copy, len(segment.copies) - 1)] if segment.copies else []
        if len(held) < count:
            raise AssertionError(f"segment {segment.name!r} is read, but not on the device")
        blocks = torch.tensor(held[:count], device=self.kv.storage.device, dtype=torch.long)
        picked = self.kv.read(blocks)
        return picked.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :visible]


class SegmentStore(CacheManager, KVReader):
    """Store of segments in a device pool, and in an optional host pool.

    groups: the reader of each group of layers; in a model with one group, the store itself.
    compute_device: device on which attention works, with its temporary copies of KV.
    scratch: meter of the bytes of these copies.
    tiers: KV budgets by "device" and, if there is one, "host".
    streams_layers: True if layers of KV are loaded one by one during a forward pass.
    writes_layers: True if each layer's KV is written to its blocks as soon as it is computed.
    """

    streams_layers, writes_layers = False, True
    pool: BlockPool

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier | None = None,
        *,
        copies_per_beam: bool = False,
        log: TransferTimeline | None = None,
    ) -> None:
        super().__init__(pool, host, copies_per_beam=copies_per_beam, log=log)
        KVReader.__init__(self, pool.kv, pool.storage.device, ScratchMeter())
        self.pool = pool
        self.groups: tuple[KVReader, ...] = (self,)
        if len(pool.layouts) > 1:
            device, scratch = self.compute_device, self.scratch
            self.groups = tuple(KVReader(kv, device, scratch) for kv in pool.groups_kv)
        self.tiers: dict[str, ByteBudget] = {"device": pool.budget}
        if host is not None:
            self.tiers["host"] = host.ledger.budget

    @property
    def device_peak_bytes(self) -> int:
        """Maximum bytes of KV on the device since `reset_peaks`."""
        return self.tiers["device"].peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Maximum bytes of KV on the host since `reset_peaks`."""
        return self.tiers["host"].peak_bytes if "host" in self.tiers else 0

    @property
    def stall_s(self) -> float:
        """Seconds that compute has waited for transfers of this KV."""
        return self.counts.transfer_wait_s

    def reset_peaks(self) -> None:
        """Start a new peak measurement (one per solved batch)."""
        for meter in (self.scratch, *self.tiers.values()):
            meter.reset_peak()

    def append(
        self,
        segments: Sequence[Segment],
        key_values: Sequence[Any],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Write tokens at the end of each segment, in all its copies.

        key_values: for each group, KV [tokens, layers, 2, kv_heads, head_dim] of all new tokens,
            segment after segment.
        lengths: number of new tokens of each segment; None if there is one segment.

        Raises:
            CapacityError: if the blocks do not fit; no token has been written in that case.
        """
        lengths = lengths or [len(key_values[0])]
        write = SegmentStore.make_writer(self, segments, lengths)
        for number, values in enumerate(key_values):
            write(number, slice(None), values)
        SegmentStore.extend_each(self, segments, lengths)

    def extend_each(self, segments: Sequence[Segment], lengths: Sequence[int]) -> None:
        """Count new tokens of the segments, after their KV was written to reserved blocks."""
        for segment, length in zip(segments, lengths, strict=True):
            self.extend(segment, length)
            held = len(segment.blocks) * segment.group.block_tokens
            assert segment.length <= held, "KV was written to blocks that were not reserved"

    def make_writer(self, segments: Sequence[Segment], lengths: Sequence[int]) -> Write:
        """Reserve blocks for new tokens of the segments, and return a `Write` for their KV.

        The KV of all segments' new tokens is [tokens, 2, kv_heads, head_dim] for one layer, or
        [tokens, layers, 2, kv_heads, head_dim] for all layers of a group. It is written to all
        copies of a segment. Call `extend_each` when all layers are written.

        lengths: number of new tokens of each segment.

        Raises:
            CapacityError: if the blocks do not fit; none is reserved in that case.
        """
        groups, every = self.pool.groups_kv, slice(None)
        places = [
            self._slot_tensors(np.divmod(slots, kv.block_tokens), segments, lengths)
            for slots, kv in zip(self.reserve_slots(segments, lengths), groups, strict=True)
        ]

        def write(group: int, place: int | slice, key_value: torch.Tensor) -> None:
            blocks, offsets, source = places[group]
            values = key_value if source is None else key_value[source]
            groups[group].write((blocks, place, every, offsets), values)

        return write

    def reserve_slots(
        self, segments: Sequence[Segment], lengths: Sequence[int]
    ) -> list[npt.NDArray[np.int64]]:
        """Reserve blocks for new tokens of the segments, and return the tokens' slots by group.

        A slot is a token's place in the pool, counted in tokens, as in vLLM. The slots of a
        segment's copies follow each other.

        lengths: number of new tokens of each segment.

        Raises:
            CapacityError: if the blocks do not fit.
        """
        self.reserve({s: s.length + n for s, n in zip(segments, lengths, strict=True)})
        slots_by_group = []
        for number, kv in enumerate(self.pool.groups_kv):
            slots, size = list[int](), kv.block_tokens
            for segment, length in zip(segments, lengths, strict=True):
                own = segment.group_segments[number]
                begin, end = own.length, own.length + length
                for blocks in own.copies:
                    for at in range(begin // size, -(-end // size)):
                        low, high = max(begin, at * size), min(end, at * size + size)
                        first = (blocks[at] - at) * size
                        slots += range(first + low, first + high)
            slots_by_group.append(np.array(slots, dtype=np.int64))
        return slots_by_group

    def _slot_tensors(
        self,
        where: Sequence[npt.NDArray[np.int64]],
        segments: Sequence[Segment],
        lengths: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return each slot's block, offset in the block, and token to write there, as tensors.

        The tokens are None if token i goes to slot i. where: arrays of the blocks and offsets.
        """
        device = self.pool.storage.device
        blocks_index, offsets = send_to_device(np.stack(where), device)
        if len(offsets) == sum(lengths):
            return blocks_index, offsets, None
        parts = zip(
            torch.arange(sum(lengths), device=device).split([*lengths]), segments, strict=True
        )
        copied = [part for part, segment in parts for _ in segment.copies]
        return blocks_index, offsets, torch.cat(copied or [blocks_index])

    def read_tokens(self, segment: Segment, first: int, end: int) -> list[torch.Tensor]:
        """Read the KV of a segment's tokens [first, end), one tensor per group.

        Used to copy a preempted row's newest tokens back to its tail (`SessionTail.restore`).
        """
        # Not strict: a segment of recurrent states may follow those of the groups.
        pairs = zip(self.groups, segment.group_segments, strict=False)
        return [group.gather(each, end)[:, :, first:] for group, each in pairs]

    def make_row_states(
        self,
        begins: Sequence[Segment | None],
        writes: Sequence[Segment | None],
        lengths: Sequence[int] | None = None,
        *,
        deferred: bool = False,
        tables: StateTables | None = None,
    ) -> RowStates:
        """Create the recurrent states of a batch, and reserve blocks for states that are written.

        begins: for each row the segment whose state it begins with (`initial_state_segment`, or its
            own); None: zeros.
        writes: for each row the segment whose state it writes; None: the state is not kept.
        The other parameters are those of `RowStates`.

        Raises:
            CapacityError: if the blocks do not fit.
        """
        assert self.pool.states is not None
        self.reserve({each: max(1, each.length) for each in writes if each is not None})
        sources = [None if each is None else each.blocks for each in begins]
        targets = [None if each is None else each.group_segments[-1].blocks for each in writes]
        given = self.pool.states, sources, targets, lengths
        return RowStates(*given, deferred=deferred, tables=tables)

    def keys_of(self, segment: Segment, visible: int) -> torch.Tensor:
        """Return keys [layers, visible, kv_heads, head_dim], for sparse selection."""
        return self.gather(segment, visible)[:, 0]

    def slots_of(self, segment: Segment, first: int, end: int) -> torch.Tensor:
        """Return the slots (`reserve_slots`) of tokens [first, end) of a segment's first copy."""
        at, size = torch.arange(first, end), self.pool.block_tokens
        return torch.tensor(segment.blocks)[at // size] * size + at % size

    def read(self, layer: int, slots: torch.Tensor, halves: slice = slice(None)) -> torch.Tensor:
        """Return keys and values [2, rows, sets, count, head_dim] of slots [rows, sets, count].

        A set is `count` slots of one KV head. Every KV head has the same number of sets.
        halves: slice(1) reads keys alone.
        """
        slots, size = slots.to(self.pool.storage.device), self.pool.block_tokens
        heads = self.heads_of(slots)
        picked = self.pool.kv.read((slots // size, layer, halves, slots % size, heads))
        return picked.permute(3, 0, 1, 2, 4)

    def heads_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the KV head of each set of slots [rows, sets, count], as [1, sets, 1]."""
        sets, kv_heads = slots.shape[1], self.pool.layout.num_kv_heads
        heads = torch.arange(sets, device=slots.device) // (sets // kv_heads)
        return heads[None, :, None]

    def fetch(self, wanted: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """Return keys and values of slots by layer, as `read` does, on the compute device."""
        return {layer: [self.read(layer, s) for s in slots] for layer, slots in wanted.items()}

    def copy_on_device(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy blocks within the device, a few at a time, because copies pass through a buffer."""
        blocks = self.pool.by_block
        if blocks.shape[1] % 8 == 0:
            blocks = blocks.view(torch.int64)
        count = max(1, _COPIED_BYTES // self.pool.bytes_per_block)
        try:
            to, read = send_to_device([destination, source], blocks.device)
            for there, here in zip(to.split(count), read.split(count), strict=True):
                blocks.index_copy_(0, there, blocks.index_select(0, here))
        # The caller has already changed the segments' blocks, so the copy must succeed. Blocks that
        # were copied before the error are copied again.
        except torch.OutOfMemoryError:
            for place, block in zip(destination, source, strict=True):
                blocks[place] = blocks[block]
