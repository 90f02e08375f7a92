"""Synthetic search trees: real strategies on random step lengths and scores, without a model.

They stand for searches with models and sizes for which no tree was recorded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from beamwright.counters import Counters
from beamwright.engine.engine import Engine
from beamwright.engine.executor import Executor, VerifierLane
from beamwright.engine.scoring import VerifierCaller
from beamwright.engine.timeline import PhaseTimer
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.protocols import Event, Foresees, Plan, ScheduleView, StepDecoded, StepWriter
from beamwright.schedule import make_schedule
from beamwright.search import make_strategy, round_rng
from beamwright.sections import ScheduleSettings, SearchSettings
from beamwright.tree import Node, NodeState, SearchTree, StopReason
from beamwright_lab.simulator.recorded import RecordedNode, RecordedTree

Survival = Literal["random", "score"]

_MOST_STEPS = 2**18  # a simulation takes about 1 ms per step and schedule


@dataclass(frozen=True)
class SyntheticSearch:
    """Settings of a synthetic search.

    generate_tokens: tokens of every path after the prompt.
    step_tokens: mean length of a step.
    step_sigma: standard deviation of the logarithm of the lognormal length; 0: equal lengths.
    step_limits: most tokens of the first, second, ... step; the last entry is for all later steps.
    survival: "random": scores are independent. "score": a child inherits part of its parent's.
    inherited: weight of the parent's score. With a large one, few families survive.
    options: further `SearchSettings`, by name.
    max_rounds: None: unlimited.

    Raises:
        InputError: if a number is out of range, or the tree would be too large.
    """

    num_beams: int
    width: int
    prompt_tokens: int
    generate_tokens: int
    step_tokens: int
    step_sigma: float = 0.0
    search: str = "beam"
    step_limits: Sequence[int] | None = None
    survival: Survival = "random"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    max_rounds: int | None = None
    inherited: float = 0.9

    def __post_init__(self) -> None:
        for name in ("num_beams", "width", "prompt_tokens", "generate_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', ' ')} must be positive")
        steps = self.num_beams * -(-self.generate_tokens // self.step_tokens)
        if steps > _MOST_STEPS:
            raise InputError(
                f"synthetic tree too large: --n {self.num_beams} paths of {self.generate_tokens} "
                f"tokens in steps of {self.step_tokens} are about {steps:,} steps, the limit is "
                f"{_MOST_STEPS:,}. Lower --n or raise --step-tokens."
            )
        if not (math.isfinite(self.step_sigma) and self.step_sigma >= 0):
            raise InputError(f"step_sigma is {self.step_sigma}; must be finite and at least 0")


def grow(search: SyntheticSearch, problem_id: int = 0) -> RecordedTree:
    """Generate the tree of a synthetic search; equal settings give equal trees.

    Raises:
        InputError: if `width` does not divide `num_beams`.
    """
    tree = SearchTree(problem_id, (0,) * search.prompt_tokens, "")
    schedule = make_schedule(ScheduleSettings(schedule="in-gpu"))
    settings = _settings(search)
    run = TreeRun(tree, make_strategy(settings), _last_score, partial(round_rng, settings))
    models, phase_timer = _RandomModels(search), PhaseTimer()
    executor = Executor(models, [VerifierLane(VerifierCaller(models, phase_timer))])
    engine = Engine(executor, schedule, phase_timer)
    engine.admit(run)
    while engine.num_live:
        engine.step()
    if run.error is not None:
        raise run.error
    nodes = tuple(map(_recorded_node, _decoded_nodes(tree)))
    return RecordedTree(problem_id, search.prompt_tokens, tree.rounds, nodes)


def foresight(search: SyntheticSearch) -> Foresees | None:
    """Return the search's strategy if it can predict its own selection, else None."""
    strategy = make_strategy(_settings(search))
    return strategy if isinstance(strategy, Foresees) else None


def _decoded_nodes(tree: SearchTree) -> list[Node]:
    return [node for node in tree.nodes() if node.parent and node.state is not NodeState.OPEN]


def _recorded_node(node: Node) -> RecordedNode:
    assert node.stop is not None
    lineage: tuple[int, ...] = node.lineage[1:]  # type: ignore[assignment]
    return RecordedNode(lineage, len(node.token_ids), node.stop, node.state, node.score)


def _last_score(scores: Sequence[float | None]) -> float | None:
    return scores[-1]


def _settings(search: SyntheticSearch) -> SearchSettings:
    return SearchSettings(
        search=search.search,
        n=search.num_beams,
        width=search.width,
        max_rounds=search.max_rounds or search.generate_tokens,  # every step has a token
        seed=search.seed,
        **search.options,
    )


class _RandomModels(StepWriter):
    """A step writer with random step lengths, and a verifier with random scores."""

    default_aggregate, probabilities, counts = "last", False, Counters()
    running_nodes: frozenset[Node] = frozenset()

    def __init__(self, search: SyntheticSearch) -> None:
        self._search = search
        self._random = random.Random(search.seed)
        self._nodes: list[Node] = []

    @property
    def busy(self) -> bool:
        return bool(self._nodes)

    def submit(self, plan: Plan) -> None:
        self._nodes = [node for group in plan.groups for node in group]

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        return ScheduleView(beams)

    def cancel(self, nodes: Sequence[Node]) -> None:
        """Do nothing: no step is in progress."""

    def release(self, nodes: Sequence[Node]) -> None:
        """Do nothing: nodes hold no KV."""

    def iterate(self) -> list[Event]:
        decoded, self._nodes = [self._decode(node) for node in self._nodes], []
        return [*decoded]

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [self._draw_score(node) for node in nodes]

    def _decode(self, node: Node) -> StepDecoded:
        left = self._search.generate_tokens - (node.start - self._search.prompt_tokens)
        tokens = min(left, self._draw_length(), self._step_limit(node))
        stop = StopReason.PATH_LIMIT if tokens == left else StopReason.STEP_LENGTH
        return StepDecoded(node, (0,) * tokens, (), stop, "")

    def _step_limit(self, node: Node) -> int:
        limits = self._search.step_limits
        if limits is None:
            return self._search.generate_tokens
        return limits[min(node.depth, len(limits)) - 1]

    def _draw_length(self) -> int:
        mean, sigma = self._search.step_tokens, self._search.step_sigma
        if sigma == 0:
            return mean
        return max(1, round(self._random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    def _draw_score(self, node: Node) -> float:
        noise = self._random.gauss(0.0, 1.0)
        parent = node.parent.score if node.parent is not None else None
        if self._search.survival == "random" or parent is None:
            return noise
        share = self._search.inherited
        return share * parent + noise * math.sqrt(1 - share**2)
