"""Costs from sizes alone: bytes and seconds of each schedule. Knows no torch and no models."""

from beamwright.cost.analytic import (
    LbsCase,
    layerwise_bytes,
    locality_bytes,
    locality_printed_bytes,
    locality_start_bytes,
)
from beamwright.cost.clairvoyant import (
    Life,
    dm_lower_bound_bytes,
    known_future_loads,
    traffic_bound,
)
from beamwright.cost.compare import (
    ResidentNeed,
    choose_schedule,
    estimate,
    max_beams_in_gpu,
    resident_need,
)
from beamwright.cost.estimate import Estimate
from beamwright.cost.growth import Workload, peak_union_tokens, tree_steps
from beamwright.cost.model import (
    ModelCosts,
    Storage,
    storage_of,
    weight_bytes,
)
from beamwright.cost.roofline import Layout, Roofline
from beamwright.cost.sampling import Spread
from beamwright.cost.scoring import Scorer

__all__ = [
    "Estimate",
    "Layout",
    "LbsCase",
    "Life",
    "ModelCosts",
    "ResidentNeed",
    "Roofline",
    "Scorer",
    "Spread",
    "Storage",
    "Workload",
    "choose_schedule",
    "dm_lower_bound_bytes",
    "estimate",
    "known_future_loads",
    "layerwise_bytes",
    "locality_bytes",
    "locality_printed_bytes",
    "locality_start_bytes",
    "max_beams_in_gpu",
    "peak_union_tokens",
    "resident_need",
    "storage_of",
    "traffic_bound",
    "tree_steps",
    "weight_bytes",
]
