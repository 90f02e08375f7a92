"""Schedules: which beams run together, in which order. Data in, data out; knows no torch.

`in-gpu` has everything resident, `layerwise` streams layers for all beams together, `locality`
runs groups that fit; `auto` is `locality`, which is one group as long as everything fits. `prefix`
cuts its groups from an order: FlashTTS's, and others to compare with.
"""

from __future__ import annotations

from beamwright.schedule.declare import (
    SCHEDULES,
    InGpuSchedule,
    LayerwiseSchedule,
    Schedule,
    ScheduleRow,
    schedule,
)
from beamwright.schedule.forest import cheapest_order, eviction_order, least_recent_order
from beamwright.schedule.locality import LocalitySchedule
from beamwright.schedule.prefix_order import PrefixSchedule
from beamwright.sections import ScheduleSettings


def make_schedule(settings: ScheduleSettings) -> Schedule:
    """The policy that `--schedule` names, with its settings checked.

    Raises:
        InputError: for an unknown name, or an option that it does not have.
    """
    return schedule_row(settings).policy(settings)


def schedule_row(settings: ScheduleSettings) -> ScheduleRow:
    """The row that `--schedule` names.

    Raises:
        InputError: for an unknown name.
    """
    return SCHEDULES.find(settings.schedule)


__all__ = [
    "SCHEDULES",
    "InGpuSchedule",
    "LayerwiseSchedule",
    "LocalitySchedule",
    "PrefixSchedule",
    "Schedule",
    "cheapest_order",
    "eviction_order",
    "least_recent_order",
    "make_schedule",
    "schedule",
    "schedule_row",
]
