"""Measure what share of the link's peak our KV transfers reach, alone and beside compute.

Times the calls that a search makes: a store's prefetch of whole segments, and its write-back of one
block per row during decoding, between a device pool and a pinned host pool. Blocks of a segment are
scattered as they are when rows are decoded together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from beamwright.kv.host import HostTier
from beamwright.kv.link import Link, StreamLink
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.segments import Segment
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import CudaStreams, HostStreams, Piece
from beamwright.protocols import Direction
from beamwright_lab.gpu.context import synchronize
from beamwright_lab.gpu.link import Timer

_SEVEN_B = KVLayout(32, 32, 128, torch.bfloat16)
_SMALL_GQA = KVLayout(28, 2, 128, torch.bfloat16)  # Qwen2.5-1.5B


@dataclass(frozen=True)
class Traffic:
    """Amount of KV to move in each direction, and the compute that runs beside."""

    layout: KVLayout = field(default_factory=lambda: _SEVEN_B)
    num_rows: int = 16
    row_blocks: int = 8
    gemm_size: int = 4096
    gemm_count: int = 100
    repeats: int = 5

    @property
    def num_blocks(self) -> int:
        return self.num_rows * self.row_blocks


SMALL = Traffic(_SMALL_GQA, 64, 16)
SMOKE = Traffic(KVLayout(2, 2, 16, torch.float32), 4, 4, 64, 10, 2)


class LinkBench:
    """A store with device and host tiers, and segments to move in each direction."""

    def __init__(self, device: str, traffic: Traffic) -> None:
        self.device, self.traffic = device, traffic
        on_gpu = device != "cpu"
        num_bytes = 2 * traffic.num_blocks * traffic.layout.bytes_per_block
        self.device_pool = BlockPool([traffic.layout], ByteBudget(num_bytes), device)
        self.host_pool = BlockPool([traffic.layout], ByteBudget(num_bytes), pinned=on_gpu)
        for pool in (self.device_pool, self.host_pool):
            pool.storage[:1].normal_()
            pool.storage[1:] = pool.storage[:1]
        streams = CudaStreams(torch.device(device)) if on_gpu else HostStreams()
        self.link: Link = StreamLink(streams)
        self.store = SegmentStore(self.device_pool, HostTier(self.host_pool, self.link))
        self.rows = {direction: self._grow_segments() for direction in Direction}
        self.prepare()
        size = traffic.gemm_size
        dtype = traffic.layout.dtype
        self.left, self.right = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")

    def _grow_segments(self) -> list[Segment]:
        """Create segments that grow together block by block, and write them back."""
        rows = [self.store.create() for _ in range(self.traffic.num_rows)]
        for _ in range(self.traffic.row_blocks):
            for row in rows:
                self.store.reserve({row: row.length + self.device_pool.block_tokens})
                self.store.extend(row, self.device_pool.block_tokens)
            self.store.write_back(rows)
        return rows

    def prepare(self) -> None:
        """Evict the segments to load from the device, and forget host copies of those to store."""
        for row in self.rows[Direction.H2D]:
            self.link.wait(row.transfers)
            for blocks in row.copies:
                self.device_pool.free(blocks)
            row.copies, row.transfers = [], []
        for row in self.rows[Direction.D2H]:
            self.link.wait(row.transfers)
            row.length = row.host_length = 0

    def move(self, directions: tuple[Direction, ...]) -> None:
        """Submit all transfers: loads at once, stores block by block as in decoding."""
        if Direction.H2D in directions:
            self.store.prefetch_group(dict.fromkeys(self.rows[Direction.H2D], 1))
        if Direction.D2H in directions:
            for block in range(self.traffic.row_blocks):
                for row in self.rows[Direction.D2H]:
                    row.length = (block + 1) * self.device_pool.block_tokens
                self.store.write_back(self.rows[Direction.D2H], sealed=False)

    def compute(self) -> None:
        for _ in range(self.traffic.gemm_count):
            torch.mm(self.left, self.right)

    def wall_s(self, directions: tuple[Direction, ...], *, computing: bool) -> float:
        """Seconds from submission until all transfers (and compute) are done."""
        self.prepare()
        synchronize(self.device)
        start = time.perf_counter()
        self.move(directions)
        if computing:
            self.compute()
        for direction in directions:
            self.link.wait([t for row in self.rows[direction] for t in row.transfers])
        synchronize(self.device)
        return time.perf_counter() - start

    def best_s(self, directions: tuple[Direction, ...], *, computing: bool) -> float:
        self.wall_s(directions, computing=computing)
        return min(
            self.wall_s(directions, computing=computing) for _ in range(self.traffic.repeats)
        )


def own_transfers(
    device: str, peaks: Mapping[str, float], traffic: Traffic
) -> list[dict[str, Any]]:
    """Measure each direction alone and beside compute; return a row each.

    efficiency: share of the direction's peak. hidden: share of the shorter of copying and computing
    that adds no time to the longer.
    """
    bench = LinkBench(device, traffic)
    compute_s = Timer(device).best(bench.compute, traffic.repeats)
    rows = []
    try:
        for name, directions in (
            ("h2d", (Direction.H2D,)),
            ("d2h", (Direction.D2H,)),
            ("both", tuple(Direction)),
        ):
            num_bytes = len(directions) * traffic.num_blocks * traffic.layout.bytes_per_block
            alone_s = bench.best_s(directions, computing=False)
            beside_s = bench.best_s(directions, computing=True)
            rows.append(
                {
                    "direction": name,
                    "mib": round(num_bytes / 2**20, 2),
                    "block_kib": round(traffic.layout.bytes_per_block / 2**10, 1),
                    "gb_s": round(num_bytes / alone_s / 1e9, 2),
                    "efficiency": round(num_bytes / alone_s / peaks[name], 3),
                    "compute_alone_s": round(compute_s, 5),
                    "copy_alone_s": round(alone_s, 5),
                    "together_s": round(beside_s, 5),
                    "hidden": round((alone_s + compute_s - beside_s) / min(alone_s, compute_s), 3),
                }
            )
    finally:
        bench.link.close()
    return rows


def copy_launch_s(device: str, traffic: Traffic) -> float:
    """Seconds that one more queued copy takes, measured with tiny copies."""
    num_copies = 200
    bench = LinkBench(device, traffic)
    tiny = Piece(bench.device_pool.block_memory(0)[:64], bench.host_pool.block_memory(0)[:64], 64)
    try:
        bench.link.wait([bench.link.submit(Direction.H2D, "load", [tiny])])
        start = time.perf_counter()
        bench.link.wait([bench.link.submit(Direction.H2D, "load", [tiny] * num_copies)])
        return (time.perf_counter() - start) / num_copies
    finally:
        bench.link.close()
