"""What a machine can do, in the few numbers that the cost model needs. No torch.

Peaks are a vendor's or a measurement's; the shares say how much of a peak real work reaches, so
that both stay visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class HardwareProfile:
    """One device, its host and the link between them. Rates are per second.

    device_memory_bytes: all of the device's memory.
    device_bandwidth: peak bytes/s of device memory.
    flops: peak dense FLOP/s in the precision that models run in there (see `element_bytes`).
    h2d_bandwidth, d2h_bandwidth: nominal bytes/s of the link, each direction.
    launch_s: cost of launching one operator or kernel that nothing hides.
    copy_launch_s: fixed cost of one queued copy.
    decode_ops_per_layer: operators of one layer in one decode step.
    bandwidth_share: of `device_bandwidth`, reached by reading weights and shared KV.
    copies_share: the same for attention over a copy of the KV per beam.
    flops_share: of `flops`, reached by the matrix products of a decode step or a prefill.
    link_share: of the link's rates, reached by large pieces in pinned memory.
    element_bytes: of the usual dtype: 2 (16 bits) on GPUs, 4 on CPUs.

    Raises:
        ValueError: if a number is not finite and positive, or a share is above 1.
    """

    name: str
    device_memory_bytes: int
    device_bandwidth: float
    flops: float
    h2d_bandwidth: float
    d2h_bandwidth: float
    launch_s: float
    copy_launch_s: float
    decode_ops_per_layer: int
    bandwidth_share: float
    copies_share: float
    flops_share: float
    link_share: float
    element_bytes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be positive, not {value!r}")
            if field.name.endswith("_share") and value > 1:
                raise ValueError(f"{field.name} is a share of a peak, not {value!r}")
