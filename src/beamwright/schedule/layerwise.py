"""Layer-wise: the baseline. All beams advance together token by token while layers are streamed."""

from __future__ import annotations

from beamwright.schedule.in_gpu import InGpuSchedule


class LayerwiseSchedule(InGpuSchedule):
    """The groups of `InGpuSchedule`; what is streamed is the executor's affair."""

    name = "layerwise"
