"""The searches that tests of the simulator share, and what they compare of replayed trees."""

from dataclasses import replace

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree.recorded import record_tree
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.verifier import VerifierCase

GIB = 2**30
CARD = find_profile("rtx-4090")
MODEL = ModelCosts.of(NAMED_SHAPES["opt-6.7b"], 2)
SEARCH = SyntheticSearch(16, 2, 128, 256, 32)
TREE = grow(SEARCH)

MANY = SyntheticSearch(8, 2, 64, 256, 32, step_sigma=0.7, survival="score")
COSTS = RooflineCosts.of(MODEL, CARD, Layout.TREE)


def trees(count):
    """Searches on so many problems."""
    return [grow(replace(MANY, seed=seed), problem_id=seed) for seed in range(count)]


def many(found, budget, schedule, verifier=None, **options):
    """A case for each tree, with a verifier. options: of the case; verifier: of the verifier's."""
    return [
        Simulation(
            tree,
            MODEL,
            COSTS,
            budget,
            ScheduleSettings(**schedule),
            StepSettings(max_step_tokens=256, max_tokens=256),
            verifier=VerifierCase(MODEL, COSTS, budget, **(verifier or {})),
            **options,
        )
        for tree in found
    ]


def steps_of(tree):
    """Of a tree that has grown."""
    found = record_tree(tree)
    return [(tuple(node["lineage"]), node["tokens"], node["state"]) for node in found["nodes"]]


def replayed(tree):
    """Of the tree that it follows."""
    return [(node.lineage, node.tokens, str(node.state)) for node in tree.nodes]
