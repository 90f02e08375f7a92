"""KV store of layer-wise offloading: each segment's first layers are on the device, the rest not.

Every segment has blocks in the host pool (LBS section 2.4). The device keeps a segment's first
layers, block by block, as long as they are resident. A layer can be on the host, on the device, or
on both. `LayerStreams` decides which layers move, and records each move here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from beamwright.kv.link import Link, Transfer
from beamwright.kv.pool import BlockPool, ByteBudget
from beamwright.kv.segments import Segment
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from beamwright.sparse.host import HostedStore
from beamwright_lab.baselines.layerwise.tail import LayeredTokens, stack_layers

# By layer: new tokens [tokens, 2, kv_heads, head_dim] on the host, and the transfer to there.
Landing = dict[int, tuple[torch.Tensor, Transfer]]


class LayeredStore(HostedStore):
    """A `HostedStore` whose device side holds whole layers.

    device_budget: bytes of resident layers and stream buffers on the device while a view is open.
    resident: layers [0, resident) stay on the device between views; before the first forward pass,
        all layers count as resident.
    landing: streamed layers of a prefill's new tokens, which `append` takes next.
    token_bytes: KV bytes of one token in one layer.
    discarded_bytes: bytes fetched ahead for a token that was not decoded with the same rows.
    """

    streams_layers = True

    def __init__(
        self, pool: BlockPool, device: torch.device, link: Link, device_budget: ByteBudget
    ) -> None:
        super().__init__(pool, device, link, device_budget)
        self.token_bytes = pool.layout.bytes_per_token // pool.layout.num_layers
        self.resident = pool.layout.num_layers
        self.discarded_bytes, self._waited_s = 0, 0.0
        # Per segment, its layers [0, n) on the device: [n, block, 2, token, kv_head, head_dim].
        self._on_device: WeakKeyDictionary[Segment, torch.Tensor] = WeakKeyDictionary()
        self._host_from: WeakKeyDictionary[Segment, int] = WeakKeyDictionary()
        self.landing: Landing = {}

    # --- counts ------------------------------------------------------------------------------

    @property
    def stall_s(self) -> float:
        self.order([])
        return super().stall_s + self._waited_s

    def order(self, transfers: Sequence[Transfer]) -> None:
        """Let compute wait for transfers, and count the wait as stall.

        A GPU reports its waits later. Without transfers, only add what it has reported so far.
        """
        self._waited_s += self.link.delay_compute(transfers)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Block the host until transfers are complete, because it reads their bytes."""
        if transfers:
            self._waited_s += self.link.wait(transfers)

    def reset_peaks(self) -> None:
        """Reset the counters, and mark all layers as resident. No view may be open."""
        super().reset_peaks()
        self.resident = self.pool.layout.num_layers
        self.discarded_bytes, self._waited_s = 0, 0.0

    # --- writing -----------------------------------------------------------------------------

    def append(
        self,
        segments: Sequence[Segment],
        key_values: Sequence[Any],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Append new tokens to segments.

        key_values: `LayeredTokens` per segment, or one tensor of all segments. A tensor stays on
        the device, except for the layers in `landing`.
        """
        lengths = lengths or [len(key_values[0])]
        landing, self.landing = self.landing, {}
        self.link.wait([transfer for _, transfer in landing.values()])
        first, written = 0, [*key_values]
        if isinstance(key_values[0], torch.Tensor):  # split by where layers reside
            written, resident = [], min(landing, default=key_values[0].shape[1])
            for values in key_values[0].split([*lengths]):
                on_host = [landing[n][0][first : first + len(values)] for n in sorted(landing)]
                stacked = stack_layers(on_host, (len(values), 0, *values.shape[2:]), values.dtype)
                written.append(LayeredTokens(values[:, :resident], stacked, 0))
                first += len(values)
        self.reserve({s: s.length + n for s, n in zip(segments, lengths, strict=True)})
        for segment, fresh in zip(segments, written, strict=True):
            self._write_on_host(segment, fresh)
            self._write_on_device(segment, fresh)
            self.extend(segment, fresh.num_tokens)

    def clear(self, segment: Segment) -> None:
        self._on_device.pop(segment, None)
        self._host_from.pop(segment, None)
        super().clear(segment)

    def _write_on_host(self, segment: Segment, fresh: LayeredTokens) -> None:
        """Write new tokens of the layers that are not on the device to the host.

        In layers that have left the device since, write the older tokens as well.
        """
        resident, held = fresh.on_device.shape[1], self.device_layers(segment)
        host_from = min(resident, held)
        if segment.length and held <= resident:
            host_from = max(host_from, self.host_from(segment))
        self._host_from[segment] = host_from
        before = fresh.num_before if resident < held else 0
        values = fresh.on_host[fresh.num_before - before :]
        self._put_on_host(segment, segment.length - before, resident, values)
        if segment.length and held < resident:  # older tokens are not on the device in these
            values = fresh.on_device[:, held:].contiguous()
            host = self.host_memory(values.shape)
            pieces = [Piece(host, values, values.nbytes)]
            self.link.wait([self.link.submit(Direction.D2H, "store", pieces)])
            self._put_on_host(segment, segment.length, held, host)

    def _put_on_host(self, segment: Segment, start: int, layer: int, values: torch.Tensor) -> None:
        """Write values [tokens, layers, ...] to the host, from token `start` and layer `layer`."""
        if not values.numel():
            return
        size = self.pool.block_tokens
        positions = torch.arange(start, start + len(values))
        blocks = torch.tensor(segment.blocks)[positions // size]
        for number in range(values.shape[1]):
            self.pool.storage[blocks, layer + number, :, positions % size] = values[:, number]

    def _write_on_device(self, segment: Segment, fresh: LayeredTokens) -> None:
        layout, resident = self.pool.layout, fresh.on_device.shape[1]
        held = self._on_device.get(segment)
        if segment.length:
            resident = min(resident, self.device_layers(segment))
        num_blocks = self.pool.blocks_for(segment.length + fresh.num_tokens)
        if held is None or held.shape[:2] != (resident, num_blocks):
            block = (2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
            size = (resident, num_blocks, *block)
            grown = torch.zeros(size, dtype=layout.dtype, device=self.compute_device)
            if held is not None:
                kept = min(num_blocks, held.shape[1])
                grown[:, :kept] = held[:resident, :kept]
            self._on_device[segment] = held = grown
        start, step = segment.length, layout.block_tokens
        positions = torch.arange(start, start + fresh.num_tokens, device=self.compute_device)
        values = fresh.on_device[:, :resident].to(self.compute_device, layout.dtype)
        # Indices that a slice parts come first: [tokens, layers, 2, kv_heads, head_dim].
        held[:, positions // step, :, positions % step] = values

    # --- looking -----------------------------------------------------------------------------

    def host_memory(self, size: Sequence[int]) -> torch.Tensor:
        """Host memory that the link can read and write at full speed."""
        pinned = self.compute_device.type == "cuda"
        return torch.empty(tuple(size), dtype=self.pool.layout.dtype, pin_memory=pinned)

    def device_layers(self, segment: Segment) -> int:
        """Return n: layers [0, n) of this segment are on the device."""
        held = self._on_device.get(segment)
        return self.pool.layout.num_layers if held is None else held.shape[0]

    def host_from(self, segment: Segment) -> int:
        """Return the first layer from which the host has this segment."""
        return self._host_from.get(segment, self.pool.layout.num_layers)

    def device_layer(self, segment: Segment, visible: int, layer: int) -> torch.Tensor:
        """Return tokens [visible, 2, kv_heads, head_dim] of a layer that is on the device."""
        return self._on_device[segment][layer].transpose(1, 2).flatten(0, 1)[:visible]

    def host_layer(self, segment: Segment, visible: int, layer: int) -> torch.Tensor:
        """Return tokens [visible, 2, kv_heads, head_dim] of a layer that is on the host."""
        count = self.pool.blocks_for(visible)
        blocks = torch.tensor(segment.blocks[:count], dtype=torch.long)
        held = self.pool.storage[:, layer].index_select(0, blocks)
        return held.transpose(1, 2).flatten(0, 1)[:visible]

    def gather(self, segment: Segment, visible: int, copy: int = 0) -> torch.Tensor:
        """Return a segment's tokens in all layers on the device, loading those on the host."""
        del copy
        held = self.device_layers(segment)
        layers = [
            self.device_layer(segment, visible, layer)
            if layer < held
            else self.host_layer(segment, visible, layer).to(self.compute_device)
            for layer in range(self.pool.layout.num_layers)
        ]
        return torch.stack(layers).transpose(1, 2)

    # --- layers that move between host and device --------------------------------------------

    def leave(self, segment: Segment, visible: int, layer: int) -> list[Piece]:
        """Return the pieces that write a device layer of a segment to the host, block by block.

        All blocks are written, but only the first `visible` tokens count as bytes: the newer ones
        belong to a tail and are counted there.
        """
        if layer >= self.device_layers(segment):
            return []
        return self._pieces(segment, self._on_device[segment], layer, visible, Direction.D2H)

    def _pieces(
        self, segment: Segment, held: torch.Tensor, layer: int, visible: int, way: Direction
    ) -> list[Piece]:
        """Return the pieces that copy a layer's blocks in direction `way`."""
        pieces, size = [], self.pool.block_tokens
        for number, block in enumerate(segment.blocks[: self.pool.blocks_for(segment.length)]):
            ends = self.pool.storage[block, layer], held[layer, number]
            num_tokens = min(size, max(0, visible - number * size))
            to, source = ends if way is Direction.D2H else ends[::-1]
            pieces.append(Piece(to, source, self.token_bytes * num_tokens))
        return pieces

    def drop_layers(self, segment: Segment, resident: int) -> None:
        """Free the device memory of the layers from `resident` on, which the host has."""
        held = self._on_device.get(segment)
        self._host_from[segment] = min(resident, self.host_from(segment))
        if held is not None and held.shape[0] > resident:
            self._on_device[segment] = held[:resident].clone()

    def add_layer(self, segment: Segment, tokens: torch.Tensor) -> None:
        """Add the next layer [tokens, 2, kv_heads, head_dim] to those on the device."""
        held, size = self._on_device[segment], self.pool.block_tokens
        positions = torch.arange(segment.length, device=self.compute_device)
        layer = held.new_zeros((1, *held.shape[1:]))
        layer[0, positions // size, :, positions % size] = tokens
        self._on_device[segment] = torch.cat([held, layer])

    def bring(self, segments: Iterable[Segment], resident: int) -> list[Transfer]:
        """Load the layers below `resident` that these segments lack on the device.

        A segment lacks a layer if the layer became resident while no row read the segment.
        """
        pieces: list[Piece] = []
        for segment in segments:
            held = self._on_device.get(segment)
            if held is None or len(held) >= resident:
                continue
            grown = held.new_zeros((resident, *held.shape[1:]))
            grown[: len(held)] = held
            self._on_device[segment] = grown
            for layer in range(len(held), resident):
                pieces += self._pieces(segment, grown, layer, segment.length, Direction.H2D)
        return [self.link.submit(Direction.H2D, "stream", pieces)] if pieces else []
