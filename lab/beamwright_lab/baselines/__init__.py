"""Baselines that the papers compare with.

An entry point of this package: what it declares joins the wheel's wherever the lab is installed.
"""

from beamwright_lab.baselines.bins import by_bins
from beamwright_lab.baselines.layerwise.declare import LayerwiseSchedule
from beamwright_lab.baselines.readings import weigh_as_printed, weigh_by_ridge

__all__ = ["LayerwiseSchedule", "by_bins", "weigh_as_printed", "weigh_by_ridge"]
