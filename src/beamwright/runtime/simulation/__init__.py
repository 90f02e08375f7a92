"""The simulator: the real loop, schedules and residency on a virtual clock, without tensors.

Trees are recorded or made up, costs come from the roofline or from a fit to a real machine.
"""

from beamwright.runtime.simulation.clock import VirtualClock
from beamwright.runtime.simulation.costs import DeviceCosts, RooflineCosts
from beamwright.runtime.simulation.engines import (
    ENGINES,
    FAIR,
    EngineCase,
    EngineResult,
    EngineRules,
    simulate_engine,
)
from beamwright.runtime.simulation.link import VirtualLink
from beamwright.runtime.simulation.replay import ReplayStrategy, ReplayTree, Script, Step, StepTree
from beamwright.runtime.simulation.run import (
    Simulation,
    SimulationResult,
    simulate,
    simulate_if_fits,
)
from beamwright.runtime.simulation.synthetic import SyntheticSearch, grow
from beamwright.runtime.simulation.verifier import VerifierCase

__all__ = [
    "ENGINES",
    "FAIR",
    "DeviceCosts",
    "EngineCase",
    "EngineResult",
    "EngineRules",
    "ReplayStrategy",
    "ReplayTree",
    "RooflineCosts",
    "Script",
    "Simulation",
    "SimulationResult",
    "Step",
    "StepTree",
    "SyntheticSearch",
    "VerifierCase",
    "VirtualClock",
    "VirtualLink",
    "grow",
    "simulate",
    "simulate_engine",
    "simulate_if_fits",
]
