"""How the running batch is filled, and what is counted of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from beamwright.counters import Counters
from beamwright.engine.row import Row
from beamwright.models.decoder import padded_rows
from beamwright.protocols import Plan
from beamwright.sections import ScheduleSettings, Speculation

_COMPACT_BELOW = 0.75


@dataclass(frozen=True)
class Batching:
    """How the running batch is filled.

    slots: most rows at a time; None for as many as fit.
    grouped: groups of a plan are barriers; None for where the tree outgrows the device and steps
    have a fixed length: rows that come one by one reload what a group shares, and where all rows of
    a group end together, nobody waits for the slowest.
    reuse: what one group leaves on the device is there for the next.
    prefetch: what waits is fetched while others are decoded.
    speculation: what becomes of slots that nobody waits for, see `decode.speculation`.
    """

    slots: int | None = None
    grouped: bool | None = None
    reuse: bool = True
    prefetch: bool = True
    speculation: Speculation = "off"

    def has_barriers(self, plan: Plan, fixed_lengths: Iterable[bool]) -> bool:
        """True if the groups of this plan are barriers; fixed_lengths: of the steps that wait."""
        if self.grouped is None:
            return plan.write_back and all(fixed_lengths)
        return self.grouped

    @classmethod
    def of(cls, settings: ScheduleSettings) -> Batching:
        """What the settings say."""
        known = {"grouped": True, "continuous": False, "auto": None}
        return cls(
            settings.max_batch,
            known[settings.batching],
            settings.reuse,
            settings.prefetch,
            settings.speculation,
        )


def count_drawn(counts: Counters, before: Mapping[Row, int]) -> int:
    """The tokens that these rows have got since they had so many; returns how many."""
    total = 0
    for row, count in before.items():
        drawn = len(row.tokens) - count
        total += drawn
        if row.speculative:
            row.node.usage["speculated"] += drawn
    counts.row_tokens += total
    return total


def worth_compacting(num_active: int, num_rows: int) -> bool:
    """True if so many rows have stopped that a smaller batch pays for its making."""
    return padded_rows(num_active) <= _COMPACT_BELOW * num_rows


def until_compacting(num_active: int, others: int, num_rows: int) -> int:
    """Rows of those that are awaited that have to stop until that is so; the others go on."""
    pays = partial(worth_compacting, num_rows=num_rows)
    left = bisect_left(range(num_active), 1, key=lambda n: int(not pays(n + others)))
    return num_active - max(0, left - 1)
