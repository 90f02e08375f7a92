"""Searches that `frontier` simulates, and levers: options that are not the default.

Synthetic searches have steps of one length, or lognormal ones ("about"); "recorded" is the bundled
pair's own search, replayed at the costs of larger models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from beamwright.cli.demo import PROBLEM
from beamwright.models.named import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.machines import find_profile, with_cuda_graphs
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree.recording import write_tree_record
from beamwright_lab.common import RESULTS, say
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import DraftedCosts, Drafts, RooflineCosts
from beamwright_lab.simulator.engines import EngineCase, EngineResult, simulate_engine
from beamwright_lab.simulator.recorded import RecordedTree, read_recorded
from beamwright_lab.simulator.run import SimulationResult, simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow

PROMPT_TOKENS = 128
LEAST_TOKENS, LEAST_ROUNDS = 320, 4
SHAPES = {"MHA": "opt-6.7b", "GQA": "llama-3.1-8b"}

_ELEMENT_BYTES = 2

# Measured on the bundled pair (n = 16): drafts from the tree, unfinished siblings included;
# suffixes of at least two tokens, at most four drafts.
OWN_DRAFTS = Drafts(0.49, 1.7)
# The same with drafts from complete requests only, as in vLLM's suffix cache.
RIVALS_DRAFTS = Drafts(0.33, 1.7)


@dataclass(frozen=True)
class Lever:
    """Options that differ from the default, for ours and for rivals alike."""

    graphs: bool = False
    kv8: bool = False
    drafts: bool = False


LEVERS: Mapping[str, Lever] = {
    "": Lever(),
    "graphs": Lever(graphs=True),
    "8-bit KV": Lever(kv8=True),
    "drafts": Lever(drafts=True),
    "8-bit KV, drafts": Lever(kv8=True, drafts=True),
}


@dataclass(frozen=True)
class Search:
    """A search on a card. steps: the name of its steps. step: limits that a schedule knows."""

    shape: str
    n: int
    steps: str
    gpu: str
    tree: RecordedTree
    step: StepSettings

    @property
    def name(self) -> str:
        return f"{self.shape}, n = {self.n}, {self.steps}"

    def roofline(self, lever: Lever) -> Roofline:
        """Cost model of the search's model on its card."""
        shape, card = shape_from_text(SHAPES[self.shape]), find_profile(self.gpu)
        model = ModelCosts.of(shape, _ELEMENT_BYTES, kv_dtype="int8" if lever.kv8 else "auto")
        return Roofline(model, with_cuda_graphs(card) if lever.graphs else card)

    def simulate(self, kv_bytes: int, options: Mapping[str, Any], lever: Lever) -> SimulationResult:
        """Simulate the search with our scheduler."""
        roofline = self.roofline(lever)
        costs = RooflineCosts(roofline, Layout.TREE)
        if lever.drafts:
            costs = DraftedCosts(roofline, Layout.TREE, OWN_DRAFTS)
        schedule = ScheduleSettings.model_validate(options)
        return simulate(Simulation(self.tree, roofline.model, costs, kv_bytes, schedule, self.step))

    def on_engine(
        self, kv_bytes: int, engine: str, lever: Lever
    ) -> tuple[EngineResult, EngineResult]:
        """Simulate the search by an engine's rules: reading KV by row, and once."""
        roofline = self.roofline(replace(lever, kv8=False))
        model, drafts = roofline.model, RIVALS_DRAFTS if lever.drafts else None
        if lever.kv8:  # rivals keep no scale per token and head
            model = replace(model, kv_bytes_per_token=model.kv_bytes_per_token // _ELEMENT_BYTES)
        case = EngineCase(self.tree, model, roofline.hardware, kv_bytes, drafts)
        return simulate_engine(case, engine)


def searches(args: argparse.Namespace) -> Iterator[Search]:
    """Yield the searches that the options ask for."""

    def tree_of(n: int, step: int, sigma: float) -> RecordedTree:
        tokens = args.generate or max(LEAST_TOKENS, LEAST_ROUNDS * step)
        return grow(SyntheticSearch(n, args.width, PROMPT_TOKENS, tokens, step, step_sigma=sigma))

    trees: dict[tuple[int, str], tuple[RecordedTree, int | None]] = {}
    for n in args.n:
        for step in args.steps:
            trees[n, f"{step}"] = tree_of(n, step, 0.0), step
        for step in args.about:
            trees[n, f"about {step}"] = tree_of(n, step, args.spread), None
        if args.recorded:
            trees[n, "recorded"] = _recorded(n, args.width), None
    for shape, ((n, steps), (tree, exactly)) in product(args.shapes, trees.items()):
        most = max(node.tokens for node in tree.nodes)
        limits = StepSettings(step_tokens=exactly, max_step_tokens=most, max_tokens=_longest(tree))
        yield Search(shape, n, steps, args.gpu, tree, limits)


def _recorded(n: int, width: int) -> RecordedTree:
    """Return the bundled pair's search of the demo's problem, recorded the first time."""
    file = RESULTS / f"frontier-tree-{n}-{width}.json"
    if not file.exists():
        from beamwright import Solver

        say(f"recording a search, n = {n}")
        solver = Solver(model="bundled", verifier="bundled", search="beam", n=n, width=width)
        file.parent.mkdir(exist_ok=True)
        write_tree_record(solver.solve(PROBLEM).tree, file)
    return read_recorded(file)


def _longest(tree: RecordedTree) -> int:
    """Tokens of the longest path, without the prompt."""
    ends: dict[tuple[int, ...], int] = {(): 0}
    for node in tree.nodes:
        ends[node.lineage] = ends[node.lineage[:-1]] + node.tokens
    return max(ends.values())
