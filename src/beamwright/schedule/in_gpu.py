"""All beams in one group, or groups of a largest batch: all KV resident, or its layers streamed."""

from __future__ import annotations

from beamwright.protocols import Plan, ScheduleView
from beamwright.schedule.declare import Schedule, schedule


def batches(view: ScheduleView, max_batch: int | None) -> Plan:
    """Contiguous ranges of the depth-first order, at most `max_batch` beams each."""
    size = view.limit(max_batch) or max(1, len(view.beams))
    beams = view.beams
    return Plan(tuple(beams[i : i + size] for i in range(0, len(beams), size)))


@schedule("in-gpu", meaning="all KV on the device", resident=True)
class InGpuSchedule(Schedule):
    """Of the settings it reads max_batch."""

    def plan(self, view: ScheduleView) -> Plan:
        return batches(view, self.settings.max_batch)


@schedule("layerwise", meaning="layers streamed for every token", streams_layers=True)
class LayerwiseSchedule(InGpuSchedule):
    """The baseline's groups; what is streamed is the attention backend's affair."""
