"""Layer-wise: the baseline. All beams advance together token by token while layers are streamed."""

from __future__ import annotations

from beamwright.schedule.declare import schedule
from beamwright.schedule.in_gpu import InGpuSchedule


@schedule("layerwise", meaning="layers streamed for every token", streams_layers=True)
class LayerwiseSchedule(InGpuSchedule):
    """The groups of `InGpuSchedule`; what is streamed is the executor's affair."""
