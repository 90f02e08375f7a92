"""Declares `--schedule layerwise`: groups as with `in-gpu`, KV on the host, layers streamed."""

from __future__ import annotations

from typing import Any

from beamwright.schedule import schedule, schedule_entry
from beamwright.schedule.declare import GROUPING_OPTIONS, InGpuSchedule
from beamwright.sections import ScheduleSettings


def _kv_method() -> Any:
    from beamwright.attention.protocols import KVMethod
    from beamwright_lab.baselines.layerwise.backend import attend_layerwise
    from beamwright_lab.baselines.layerwise.store import LayeredStore

    option = "--schedule layerwise"
    return KVMethod(
        option, option, make_store=LayeredStore, attend=attend_layerwise, tails_apart=False
    )


@schedule(
    "layerwise",
    meaning="layers streamed for every token",
    kv_method=_kv_method,
    # Streaming needs rows that begin together, with no other rows in the batch.
    fixed={"batching": "grouped", "speculation": "off"},
    unused_options=GROUPING_OPTIONS,
)
class LayerwiseSchedule(InGpuSchedule):
    """The schedule of layer-wise offloading: groups as `in-gpu`; the attention backend streams."""


def streams_layers(settings: ScheduleSettings) -> bool:
    """Return whether `--schedule` names layer-wise offloading."""
    return issubclass(schedule_entry(settings).make, LayerwiseSchedule)
