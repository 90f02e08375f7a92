"""In-GPU: all KV is resident, so all beams form one group, or groups of a largest batch."""

from __future__ import annotations

from beamwright.protocols import Plan, ScheduleView


class InGpuSchedule:
    """Contiguous ranges of the depth-first order, at most `max_batch` beams each."""

    name = "in-gpu"

    def __init__(self, max_batch: int | None = None) -> None:
        self.max_batch = max_batch

    def plan(self, view: ScheduleView) -> Plan:
        """See `protocols.SchedulePolicy`."""
        size = view.limit(self.max_batch) or max(1, len(view.beams))
        beams = view.beams
        return Plan(tuple(beams[i : i + size] for i in range(0, len(beams), size)))
