"""The loop: plan, run, commit, select. Several trees may be in flight; rounds are per tree.

Data flows one way: problem -> tree -> plan -> device -> tree -> answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from beamwright.protocols import (
    Action,
    Complete,
    DecodeWork,
    Executor,
    Extend,
    Finish,
    Prune,
    RoundCallback,
    RoundReport,
    SchedulePolicy,
    ScheduleView,
    StepDecoded,
    StepScored,
    Strategy,
    VerifyWork,
)
from beamwright.runtime.accounting import Accounting
from beamwright.tree import Node, NodeState, SearchTree

Aggregate = Callable[[Sequence[float | None]], float | None]


@dataclass
class TreeRun:
    """One tree in flight, and what is measured of it.

    finished_s: seconds from admission to the end of scoring, per final candidate.
    round_tokens: distinct path tokens that each round's beams extend (their KV is needed).
    """

    tree: SearchTree
    started_s: float = field(default_factory=time.perf_counter)
    ended_s: float = 0.0
    finished_s: dict[Node, float] = field(default_factory=dict)
    round_tokens: list[int] = field(default_factory=list)


class SearchLoop:
    """Runs trees to their end with one strategy, one schedule, one executor."""

    def __init__(
        self,
        executor: Executor,
        schedule: SchedulePolicy,
        strategy: Strategy,
        aggregate: Aggregate,
        accounting: Accounting,
    ) -> None:
        self._executor, self._schedule, self._strategy = executor, schedule, strategy
        self._aggregate, self._accounting = aggregate, accounting

    def run(self, runs: Sequence[TreeRun], on_round: RoundCallback | None = None) -> None:
        """Grow every tree to its end.

        Raises:
            CapacityError: if the device cannot hold the search; all KV is freed first.
        """
        try:
            for run in runs:
                self._apply(run, on_round)
            while going := [run for run in runs if not run.tree.done]:
                self._round(going)
                for run in going:
                    run.tree.rounds += 1
                    self._apply(run, on_round)
        finally:
            for run in runs:
                run.tree.done = True
                self._executor.release(run.tree.release_dead())

    def _round(self, runs: Sequence[TreeRun]) -> None:
        """One round of every tree: decode all open nodes group by group, then score them."""
        beams = _open_nodes(runs)
        for run in runs:
            run.round_tokens.append(_distinct_tokens(run.tree.open_nodes()))
        # Beams that were parked stay open, and are planned again.
        while going := _open_nodes(runs):
            with self._accounting.phase("schedule"):
                plan = self._schedule.plan(ScheduleView(going, self._executor.demand(going)))
            for place, group in enumerate(plan.groups):
                later = plan.groups[place + 1 :]
                grouped = len(plan.groups) > 1
                self._executor.submit(DecodeWork(group, later, plan.write_back, grouped))
            self._commit(runs)
        self._executor.submit(VerifyWork(beams))
        self._commit(runs)

    def _commit(self, runs: Sequence[TreeRun]) -> None:
        """Write events into the trees."""
        trees = {run.tree.root: run.tree for run in runs}
        for event in self._executor.wait():
            node = event.node
            if isinstance(event, StepDecoded):
                trees[node.root].commit(
                    node, event.token_ids, event.logprobs, event.stop, event.text
                )
            elif isinstance(event, StepScored):
                node.step_score = event.score
                node.score = self._aggregate([step.step_score for step in node.path()[1:]])

    def _apply(self, run: TreeRun, on_round: RoundCallback | None) -> None:
        """Let the strategy decide, obey, free what nobody needs, tell the caller."""
        tree = run.tree
        candidates = tuple(tree.candidates())
        with self._accounting.phase("schedule"):
            actions = self._strategy.select(tree)
        for action in actions:
            _obey(tree, action)
        now = time.perf_counter()
        for node in candidates:
            if node.state is NodeState.FINISHED:
                run.finished_s[node] = now - run.started_s
        if tree.done:
            run.ended_s = now - run.started_s
        self._executor.release(tree.release_dead())
        if on_round is not None and tree.rounds > 0:
            on_round(_report(run, candidates, now))


def _open_nodes(runs: Sequence[TreeRun]) -> tuple[Node, ...]:
    return tuple(node for run in runs for node in run.tree.open_nodes())


def _obey(tree: SearchTree, action: Action) -> None:
    match action:
        case Extend(node, children, greedy):
            if node.state is NodeState.CANDIDATE:
                tree.keep(node)
            tree.expand(node, children, greedy=greedy)
        case Prune(node):
            tree.prune(node)
        case Complete(node):
            tree.finish(node)
        case Finish(reason):
            tree.done = True
            tree.reason_fewer = reason


def _distinct_tokens(beams: Sequence[Node]) -> int:
    """Tokens in the union of the beams' paths, the open steps left out."""
    nodes = {ancestor for beam in beams if beam.parent for ancestor in beam.parent.path()}
    return sum(len(node.token_ids) for node in nodes)


def _report(run: TreeRun, candidates: tuple[Node, ...], now: float) -> RoundReport:
    def in_state(state: NodeState) -> tuple[Node, ...]:
        return tuple(node for node in candidates if node.state is state)

    return RoundReport(
        tree=run.tree,
        round=run.tree.rounds,
        candidates=candidates,
        survivors=in_state(NodeState.KEPT),
        pruned=in_state(NodeState.PRUNED),
        finished=in_state(NodeState.FINISHED),
        elapsed_s=now - run.started_s,
    )
