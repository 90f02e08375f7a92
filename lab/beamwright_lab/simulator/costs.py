"""Roofline times of a simulated device's operations, from counts of tokens and bytes.

Attention reads the KV of every row's path (`Layout.DENSE`), or shared prefixes once
(`Layout.TREE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from beamwright.plan.costs import CHUNK_TOKENS, Layout, ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.protocols import Direction


@dataclass(frozen=True)
class Work:
    """Work of a device, such as a forward pass.

    seconds: duration if nothing else runs.
    memory_s, compute_s: seconds of it in which the work keeps device memory, or the arithmetic
        units, busy. The rest can serve concurrent work.
    """

    seconds: float
    memory_s: float
    compute_s: float

    @classmethod
    def alone(cls, seconds: float) -> Work:
        """Create work that leaves nothing to concurrent work."""
        return cls(seconds, seconds, seconds)


# Host time of one path and token between two captured passes. Measured with a 1.5B model at 16, 64
# and 256 paths (docs/log/2026-11.md#what-stands-between-kernels).
HOST_ROW_S = 4.5e-6


@dataclass(frozen=True)
class RooflineCosts:
    """Times of a model's operations on a machine, by the roofline.

    layout: how attention reads KV.
    row_s: host time per row and token, during which the device is idle.
    """

    roofline: Roofline
    layout: Layout
    row_s: float = field(default=0.0, kw_only=True)

    @classmethod
    def of(
        cls, model: ModelCosts, hardware: HardwareProfile, layout: Layout, row_s: float = 0.0
    ) -> RooflineCosts:
        return cls(Roofline(model, hardware), layout, row_s=row_s)

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        """Return the work of decoding `count` tokens for each of `num_rows` rows.

        read_tokens, seen_tokens: KV tokens of the first pass, each row's new token included (see
            `Roofline.decode_step_s`). Both grow by `grow` per pass.
        """
        reads = [read_tokens + i * grow for i in range(count)]
        sees = [seen_tokens + i * grow for i in range(count)]
        return self._passes(num_rows, reads, sees, self.layout, grow)

    def prefill(self, num_tokens: int, read_tokens: int, seen_tokens: int) -> Work:
        """Return the work of a prefill. In any layout it reads shared prefixes once.

        Recurrent states are read and written once per chunk.
        """
        chunks = -(-num_tokens // CHUNK_TOKENS)
        return self._passes(num_tokens, [read_tokens], [seen_tokens], Layout.TREE, chunks)

    def copy(self, num_bytes: int) -> float:
        """Return the seconds of a copy within device memory: each byte is read and written."""
        hardware = self.roofline.hardware
        return 2 * num_bytes / (hardware.device_bandwidth * hardware.bandwidth_share)

    def transfer(self, num_bytes: int, num_pieces: int, direction: Direction) -> float:
        return self.roofline.transfer_s(num_bytes, num_pieces, direction)

    def _passes(
        self,
        num_rows: int,
        reads: Sequence[int],
        sees: Sequence[int],
        layout: Layout,
        num_states: int,
    ) -> Work:
        """Return the work of consecutive passes, with KV tokens read and seen in each."""
        seconds = memory_s = compute_s = 0.0
        for read_tokens, seen_tokens in zip(reads, sees, strict=True):
            memory, compute, launch = self.roofline.pass_parts_s(
                num_rows, read_tokens, seen_tokens, layout, num_states
            )
            seconds += max(memory, compute) + launch + num_rows * self.row_s
            memory_s, compute_s = memory_s + memory, compute_s + compute
        return Work(seconds, memory_s, compute_s)


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding with drafts: assumed means per row and forward pass.

    accepted: draft tokens that the row would have sampled as well.
    drafted: draft tokens forwarded.
    """

    accepted: float
    drafted: float


# Shares of the rows that get drafts. Drafts for all rows may make a pass compute-bound.
_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DraftedCosts(RooflineCosts):
    """Roofline times with draft tokens wherever these are faster.

    A fluid model: every row accepts the mean in every pass, and a token costs a fraction of a pass.
    """

    drafts: Drafts

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        plain = super().tokens(num_rows, read_tokens, seen_tokens, grow, count)
        drafted = (
            self._drafted(share, num_rows, read_tokens, seen_tokens, grow, count)
            for share in _SHARES
        )
        return min((plain, *drafted), key=lambda work: work.seconds)

    def _drafted(
        self, share: float, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        """Return the work of `tokens` if this share of the rows gets drafts."""
        rows = 1 + share * self.drafts.drafted
        work = super().tokens(
            round(num_rows * rows), read_tokens, round(seen_tokens * rows), grow, count
        )
        drawn = 1 + share * self.drafts.accepted
        return Work(work.seconds / drawn, work.memory_s / drawn, work.compute_s / drawn)
