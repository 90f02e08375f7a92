"""Schedules: decide which beams run together, and in which order.

A beam is an open node of a search tree. A schedule maps plain data to plain data and uses no torch.
`in-gpu` keeps all KV resident. `locality` runs groups of beams whose KV fits the device. `auto` is
`locality`, which forms a single group as long as all KV fits.

Importing this package imports all of its modules, so each module can declare a schedule.
"""

from __future__ import annotations

from beamwright.registry import import_modules
from beamwright.schedule.declare import SCHEDULES, Schedule, ScheduleRow, schedule
from beamwright.sections import ScheduleSettings


def make_schedule(settings: ScheduleSettings) -> Schedule:
    """Return the schedule that `--schedule` names, with checked options.

    Raises:
        InputError: for an unknown name, or for an option that the schedule does not have.
    """
    return schedule_row(settings).policy(settings)


def schedule_row(settings: ScheduleSettings) -> ScheduleRow:
    """Return the table row of the schedule that `--schedule` names.

    Raises:
        InputError: for an unknown name.
    """
    return SCHEDULES.find(settings.schedule)


import_modules(__name__, __path__)

__all__ = ["SCHEDULES", "Schedule", "ScheduleRow", "make_schedule", "schedule", "schedule_row"]
