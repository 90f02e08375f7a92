"""Baselines of the papers: layer-wise offloading, SelectSPEC, other readings of AsyncSpade's Eq. 2.

The lab's package has an entry point for this module, so its options join Beamwright's own wherever
the lab is installed.
"""

from beamwright_lab.baselines.bins import by_bins
from beamwright_lab.baselines.layerwise.declare import LayerwiseSchedule
from beamwright_lab.baselines.readings import weigh_as_printed, weigh_by_ridge

__all__ = ["LayerwiseSchedule", "by_bins", "weigh_as_printed", "weigh_by_ridge"]
