"""Seconds of what a simulated device does, from the roofline.

Knows counts of tokens and bytes; no tree, no clock. A group whose rows each follow their own
copy reads the sum of the paths (`Layout.DENSE`), otherwise their union (`Layout.TREE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from beamwright.plan.costs import CHUNK_TOKENS, Layout, ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.protocols import Direction


@dataclass(frozen=True)
class Work:
    """Something that a device does.

    seconds: what it takes alone. memory_s, compute_s: of them, those in which device memory, and
    the arithmetic units, are in use; the least that other work beside it leaves them free.
    """

    seconds: float
    memory_s: float
    compute_s: float

    @classmethod
    def alone(cls, seconds: float) -> Work:
        """Work that lets nothing run beside it."""
        return cls(seconds, seconds, seconds)


# Of a path and token, between captured passes: that card's step of 1.5B less its replay, at 16, 64
# and 256 paths (docs/log/2026-11.md#what-stands-between-kernels).
HOST_ROW_S = 4.5e-6


@dataclass(frozen=True)
class RooflineCosts:
    """Seconds of each operation of a model on a machine that nobody needs to have.

    layout: how attention reads KV. row_s: the host's, of each row and token, while nothing else
    runs.
    """

    roofline: Roofline
    layout: Layout
    row_s: float = field(default=0.0, kw_only=True)

    @classmethod
    def of(
        cls, model: ModelCosts, hardware: HardwareProfile, layout: Layout, row_s: float = 0.0
    ) -> RooflineCosts:
        """The costs of one layout."""
        return cls(Roofline(model, hardware), layout, row_s=row_s)

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        """`count` tokens for each of `num_rows` rows.

        read_tokens, seen_tokens: of the first of them, the new token of each row included (see
        `Roofline.decode_step`); both grow by `grow` with every further one.
        """
        reads = [read_tokens + i * grow for i in range(count)]
        sees = [seen_tokens + i * grow for i in range(count)]
        return self._passes(num_rows, reads, sees, self.layout, grow)

    def prefill(self, num_tokens: int, read_tokens: int, seen_tokens: int) -> Work:
        """Shared parts are read once whatever the layout, a state for each chunk of a row."""
        chunks = -(-num_tokens // CHUNK_TOKENS)
        return self._passes(num_tokens, [read_tokens], [seen_tokens], Layout.TREE, chunks)

    def copy(self, num_bytes: int) -> float:
        """Every byte is read and written."""
        hardware = self.roofline.hardware
        return 2 * num_bytes / (hardware.device_bandwidth * hardware.bandwidth_share)

    def transfer(self, num_bytes: int, num_pieces: int, direction: Direction) -> float:
        """One transfer across the link."""
        return self.roofline.transfer(num_bytes, num_pieces, direction)

    def _passes(
        self,
        num_rows: int,
        reads: Sequence[int],
        sees: Sequence[int],
        layout: Layout,
        num_states: int,
    ) -> Work:
        """Forward passes one after the other, of these numbers of tokens read and seen."""
        seconds = memory_s = compute_s = 0.0
        for read_tokens, seen_tokens in zip(reads, sees, strict=True):
            memory, compute, launch = self.roofline.parts(
                num_rows, read_tokens, seen_tokens, layout, num_states
            )
            seconds += max(memory, compute) + launch + num_rows * self.row_s
            memory_s, compute_s = memory_s + memory, compute_s + compute
        return Work(seconds, memory_s, compute_s)


@dataclass(frozen=True)
class Drafts:
    """Tokens guessed and checked, in the mean of a row and pass: an input, not an outcome.

    accepted: as the row would have drawn them; drafted: forwarded besides the row's own.
    """

    accepted: float
    drafted: float


# Of the rows, those that get drafts, where arithmetic has no room for all.
_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DraftedCosts(RooflineCosts):
    """The same with drafts, wherever they pay: a token then takes a part of a longer pass.

    Fluid: every row gets the mean in every pass, and of a step's last pass only what it needs.
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
        """With drafts for a share of the rows."""
        rows = 1 + share * self.drafts.drafted
        work = super().tokens(
            round(num_rows * rows), read_tokens, round(seen_tokens * rows), grow, count
        )
        drawn = 1 + share * self.drafts.accepted
        return Work(work.seconds / drawn, work.memory_s / drawn, work.compute_s / drawn)
