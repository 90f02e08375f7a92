"""Schedules: which beams run together, in which order. Data in, data out; knows no torch.

`in-gpu` has everything resident, `layerwise` streams layers for all beams together, `locality`
runs groups that fit; `auto` is `locality`, which is one group as long as everything fits.
"""

from __future__ import annotations

from collections.abc import Callable

from beamwright.config import ScheduleSettings
from beamwright.protocols import SchedulePolicy
from beamwright.schedule.eviction import eviction_order
from beamwright.schedule.in_gpu import InGpuSchedule
from beamwright.schedule.layerwise import LayerwiseSchedule
from beamwright.schedule.locality import LocalitySchedule
from beamwright.schedule.replay import loaded_bytes

SCHEDULES: dict[str, Callable[[ScheduleSettings], SchedulePolicy]] = {
    "in-gpu": lambda settings: InGpuSchedule(settings.max_batch),
    "layerwise": lambda settings: LayerwiseSchedule(settings.max_batch),
    "locality": LocalitySchedule,
    "auto": LocalitySchedule,
}


def make_schedule(settings: ScheduleSettings) -> SchedulePolicy:
    """The policy that `--schedule` names."""
    return SCHEDULES[settings.schedule](settings)


__all__ = [
    "InGpuSchedule",
    "LayerwiseSchedule",
    "LocalitySchedule",
    "eviction_order",
    "loaded_bytes",
    "make_schedule",
]
