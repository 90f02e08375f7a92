"""The search that tests of the simulator share, and cases of it."""

from dataclasses import fields

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import NodeState, StopReason
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.recorded import RecordedNode, RecordedTree
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.verifier import VerifierCase

GIB = 2**30
CARD = find_profile("rtx-4090")
MODEL = ModelCosts.of(NAMED_SHAPES["opt-6.7b"], 2)
SEARCH = SyntheticSearch(16, 2, 128, 256, 32)
TREE = grow(SEARCH)

STEP = StepSettings(step_tokens=32, max_tokens=256)
_FIELDS = {each.name for each in fields(Simulation)} - {"schedule"}


def case(
    schedule="locality", budget=8 * GIB, tree=TREE, model=MODEL, layout=Layout.TREE, **options
):
    """A search on the card. options: of the case, among them `step`, else of the schedule.

    scorer: the verifier's model, its bytes, and what else is said of it.
    """
    if "scorer" in options:
        costs, bytes_, more = options.pop("scorer")
        scored = RooflineCosts.of(costs, CARD, layout)
        options["verifier"] = VerifierCase(costs, scored, bytes_, **more)
    own = {"step": STEP, **{name: options.pop(name) for name in [*options] if name in _FIELDS}}
    settings = ScheduleSettings(schedule=schedule, **options)
    costs = RooflineCosts.of(model, CARD, layout)
    return Simulation(tree, model, costs, budget, settings, **own)


def longest(tree):
    """Settings that know no more of steps than the longest one."""
    return StepSettings(max_step_tokens=max(node.tokens for node in tree.nodes))


def recorded(prompt, steps, stop=StopReason.STEP_LENGTH):
    """A tree of these steps: lineage -> tokens. Those that nothing follows have finished."""
    parents = {lineage[:-1] for lineage in steps}
    nodes = tuple(
        RecordedNode(
            lineage, tokens, stop, NodeState.KEPT if lineage in parents else NodeState.FINISHED, 0.5
        )
        for lineage, tokens in steps.items()
    )
    return RecordedTree(0, prompt, max(map(len, steps)), nodes)
