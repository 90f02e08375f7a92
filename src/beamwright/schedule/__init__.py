"""Schedules (`--schedule`): divide the beams of a round into groups, and order the groups.

The beams of a group are decoded together. `in-gpu` keeps all KV on the device. `locality` runs
groups whose KV fits the device. `auto` is `locality`, which forms one group if all KV fits. A
schedule maps plain data to plain data and uses no torch.

Importing this package imports all of its modules, because importing a module declares its
schedules.
"""

from __future__ import annotations

from beamwright.registry import import_modules
from beamwright.schedule.declare import SCHEDULES, Schedule, ScheduleEntry, schedule
from beamwright.sections import ScheduleSettings


def make_schedule(settings: ScheduleSettings) -> Schedule:
    """Build the schedule that `--schedule` names, with its options from `settings`.

    Raises:
        InputError: for an unknown name, or for an option that the schedule does not have.
    """
    return schedule_entry(settings).make_policy(settings)


def schedule_entry(settings: ScheduleSettings) -> ScheduleEntry:
    """Return the declaration of the schedule that `--schedule` names.

    Raises:
        InputError: for an unknown name.
    """
    return SCHEDULES.find(settings.schedule)


import_modules(__name__, __path__)

__all__ = ["SCHEDULES", "Schedule", "ScheduleEntry", "make_schedule", "schedule", "schedule_entry"]
