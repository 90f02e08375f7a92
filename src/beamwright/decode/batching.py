"""How the running batch is filled, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from beamwright.config import ScheduleSettings


@dataclass(frozen=True)
class Batching:
    """How the running batch is filled.

    slots: most rows at a time; None for as many as fit.
    grouped: groups of a plan are barriers; None for where the tree outgrows the device and steps
    have a fixed length: rows that come one by one reload what a group shares, and where all rows of
    a group end together, nobody waits for the slowest.
    reuse: what one group leaves on the device is there for the next.
    prefetch: what waits is fetched while others are decoded.
    """

    slots: int | None = None
    grouped: bool | None = None
    reuse: bool = True
    prefetch: bool = True

    @classmethod
    def of(cls, settings: ScheduleSettings, *, together: bool = False) -> Batching:
        """What the settings say. together: rows begin together whatever they say."""
        known = {"grouped": True, "continuous": False, "auto": None}
        grouped = True if together else known[settings.batching]
        return cls(settings.max_batch, grouped, settings.reuse, settings.prefetch)


@dataclass
class BatchCounts:
    """What the running batch did.

    groups: how often it was filled from empty. iterations: of at most 16 tokens. row_tokens:
    tokens of real rows. slot_tokens: of all rows that were computed, padding included.
    preempted: rows that had to leave in the middle of their step.
    """

    groups: int = 0
    iterations: int = 0
    row_tokens: int = 0
    slot_tokens: int = 0
    preempted: int = 0
