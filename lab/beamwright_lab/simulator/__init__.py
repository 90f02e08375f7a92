"""The simulator: the real loop, schedules and residency on a virtual clock, without tensors.

Trees are recorded or made up; costs come from the roofline (`checks/calibration.py`
fits them to a machine instead).
"""

from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.engines import (
    ENGINES,
    FAIR,
    EngineCase,
    simulate_engine,
)
from beamwright_lab.simulator.link import VirtualLink
from beamwright_lab.simulator.many import ManyResult, simulate_many
from beamwright_lab.simulator.replay import Foresight, Script
from beamwright_lab.simulator.run import (
    SimulationResult,
    simulate,
    simulate_if_fits,
)
from beamwright_lab.simulator.scripted_rows import Moments
from beamwright_lab.simulator.sparse import SparseSearch, simulate_sparse
from beamwright_lab.simulator.synthetic import SyntheticSearch, foresight, grow
from beamwright_lab.simulator.verifier import VerifierCase

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
