"""Schedules: which beams run together, in which order. Data in, data out; knows no torch.

`in-gpu`, everything resident, is the one schedule of a single tier.
"""

from __future__ import annotations

from beamwright.config import ScheduleSettings
from beamwright.protocols import SchedulePolicy
from beamwright.schedule.in_gpu import InGpuSchedule


def make_schedule(settings: ScheduleSettings) -> SchedulePolicy:
    """The policy that `--schedule` names."""
    return InGpuSchedule(settings.max_batch)


__all__ = ["InGpuSchedule", "make_schedule"]
