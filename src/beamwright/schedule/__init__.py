"""Schedules: which beams run together, in which order. Data in, data out; knows no torch.

`in-gpu` has everything resident, `locality` runs groups that fit; `auto` is `locality`, which is
one group as long as everything fits. One file with one declaration each: every module of this
folder is imported, and with it what it declares.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from beamwright.schedule.declare import SCHEDULES, Schedule, ScheduleRow, schedule
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


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["SCHEDULES", "Schedule", "ScheduleRow", "make_schedule", "schedule", "schedule_row"]
