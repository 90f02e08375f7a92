"""The simulator: the real loop, schedules and residency on a virtual clock, without tensors.

Trees are recorded or made up; costs come from the roofline (`benchmarks/checks/calibration.py`
fits them to a machine instead).
"""

from beamwright.simulator.bench import Simulation
from beamwright.simulator.clock import VirtualClock
from beamwright.simulator.costs import RooflineCosts
from beamwright.simulator.engines import (
    ENGINES,
    FAIR,
    EngineCase,
    simulate_engine,
)
from beamwright.simulator.link import VirtualLink
from beamwright.simulator.many import ManyResult, simulate_many
from beamwright.simulator.replay import Foresight, Script
from beamwright.simulator.run import (
    SimulationResult,
    simulate,
    simulate_if_fits,
)
from beamwright.simulator.scripted_rows import Moments
from beamwright.simulator.sparse import SparseSearch, simulate_sparse
from beamwright.simulator.synthetic import SyntheticSearch, foresight, grow
from beamwright.simulator.verifier import VerifierCase

__all__ = [
    "ENGINES",
    "FAIR",
    "EngineCase",
    "Foresight",
    "ManyResult",
    "Moments",
    "RooflineCosts",
    "Script",
    "Simulation",
    "SimulationResult",
    "SparseSearch",
    "SyntheticSearch",
    "VerifierCase",
    "VirtualClock",
    "VirtualLink",
    "foresight",
    "grow",
    "simulate",
    "simulate_engine",
    "simulate_if_fits",
    "simulate_many",
    "simulate_sparse",
]
