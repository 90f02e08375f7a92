"""How much of the link's peak our own KV transfers reach, alone and beside compute.

Blocks of a 7B model's KV, each in one contiguous piece, between a pinned pool and a device pool.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from beamwright.kv import (
    BlockPool,
    ByteBudget,
    CopierLink,
    CudaStreams,
    Direction,
    KVLayout,
    Link,
    Piece,
    StreamLink,
)
from gpu.ceilings import Timer
from gpu.context import synchronize


@dataclass(frozen=True)
class Traffic:
    """Shape of the KV that is moved, how much of it, and the compute that runs beside."""

    layout: KVLayout = field(default_factory=lambda: KVLayout(32, 32, 128, torch.bfloat16))
    num_blocks: int = 128
    transfer_blocks: int = 16
    gemm_size: int = 4096
    gemm_count: int = 100
    repeats: int = 5


SMOKE = Traffic(KVLayout(2, 2, 16, torch.float32), 16, 4, 64, 10, 2)


class Bench:
    """Two pools and a link between them."""

    def __init__(self, device: str, traffic: Traffic) -> None:
        self.device, self.traffic = device, traffic
        on_gpu = device != "cpu"
        num_bytes = 2 * traffic.num_blocks * traffic.layout.bytes_per_block
        self.near = BlockPool(traffic.layout, ByteBudget(num_bytes), device)
        self.far = BlockPool(traffic.layout, ByteBudget(num_bytes), pinned=on_gpu)
        for pool in (self.near, self.far):
            pool.storage[:1].normal_()
            pool.storage[1:] = pool.storage[:1]
        self.link: Link = CopierLink()
        if on_gpu:
            self.link = StreamLink(CudaStreams(torch.device(device)))
        size = traffic.gemm_size
        dtype = traffic.layout.dtype
        self.left, self.right = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")

    def pieces(self, direction: Direction, first: int) -> list[Piece]:
        """One transfer's blocks. The directions use halves of the pools of their own."""
        start = first + (self.traffic.num_blocks if direction is Direction.D2H else 0)
        found = []
        for block in range(start, start + self.traffic.transfer_blocks):
            ends = self.near.block_bytes(block), self.far.block_bytes(block)
            source, target = ends if direction is Direction.D2H else ends[::-1]
            found.append(Piece(target, source, self.near.bytes_per_block))
        return found

    def move(self, directions: tuple[Direction, ...]) -> list[Any]:
        """Submit everything, block ranges of the directions taking turns."""
        firsts = range(0, self.traffic.num_blocks, self.traffic.transfer_blocks)
        return [
            self.link.submit(direction, "load", self.pieces(direction, first))
            for first in firsts
            for direction in directions
        ]

    def compute(self) -> None:
        for _ in range(self.traffic.gemm_count):
            torch.mm(self.left, self.right)

    def wall_s(self, directions: tuple[Direction, ...], *, computing: bool) -> float:
        """Seconds from submission until all has moved (and been computed)."""
        synchronize(self.device)
        start = time.perf_counter()
        transfers = self.move(directions)
        if computing:
            self.compute()
        self.link.wait(transfers)
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
    """One row per direction, alone and beside compute.

    efficiency: of the peak of the same direction. hidden: the share of the shorter of copying
    and computing that did not add to the time of the longer.
    """
    bench = Bench(device, traffic)
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
                    "piece_kib": round(traffic.layout.bytes_per_block / 2**10, 1),
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
    """Seconds of one more queued copy that is too small to take any."""
    num_copies = 200
    bench = Bench(device, traffic)
    whole = bench.pieces(Direction.H2D, 0)[0]
    tiny = Piece(whole.destination[:64], whole.source[:64], 64)
    try:
        bench.link.wait([bench.link.submit(Direction.H2D, "load", [tiny])])
        start = time.perf_counter()
        bench.link.wait([bench.link.submit(Direction.H2D, "load", [tiny] * num_copies)])
        return (time.perf_counter() - start) / num_copies
    finally:
        bench.link.close()
