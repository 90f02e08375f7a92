"""The loop: plan, run, commit, select. Several trees may be in flight; rounds are per tree.

Data flows one way: problem -> tree -> plan -> device -> tree -> answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from beamwright.config import SearchSettings
from beamwright.protocols import (
    Action,
    Ask,
    Complete,
    DecodeWork,
    Executor,
    Extend,
    Finish,
    Prune,
    RoundCallback,
    RoundReport,
    SchedulePolicy,
    StepDecoded,
    StepScored,
    Strategy,
    VerifyWork,
)
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.limits import StopRule
from beamwright.runtime.obeyed import decided, planned
from beamwright.runtime.scores import check_path_score
from beamwright.search import round_rng
from beamwright.tree import Node, NodeState, SearchTree, Turn

Aggregate = Callable[[Sequence[float | None]], float | None]
# Token ids of a turn behind an ended reply; None where it does not fit the context.
RenderTurn = Callable[[Node, Turn], tuple[int, ...] | None]


@dataclass
class TreeRun:
    """One tree in flight, and what is measured of it.

    elapsed_s: seconds that earlier processes spent on a tree that is resumed.
    started_s: when this process started with it, on the loop's clock; None until then.
    finished_s: seconds from admission to the end of scoring, per final candidate; ended_s: of all.
    round_tokens: distinct path tokens that each round's beams extend (their KV is needed).
    rule: what may stop the search early.
    save: called when a round is scored and nothing is decided about it yet.
    restore: gives the nodes of a resumed tree their KV back, once it is known which are needed.
    cut: True if the deadline has passed in the middle of a round.
    """

    tree: SearchTree
    elapsed_s: float = 0.0
    started_s: float | None = None
    ended_s: float = 0.0
    finished_s: dict[Node, float] = field(default_factory=dict)
    round_tokens: list[int] = field(default_factory=list)
    rule: StopRule | None = None
    save: Callable[[TreeRun, float], None] | None = None
    restore: Callable[[Sequence[Node]], None] | None = None
    cut: bool = False

    def here_s(self, now: float) -> float:
        """Seconds that this process has spent on the tree."""
        return 0.0 if self.started_s is None else now - self.started_s

    def total_s(self, now: float) -> float:
        """Seconds that all processes have spent on the tree."""
        return self.elapsed_s + self.here_s(now)


class SearchLoop:
    """Runs trees to their end with one strategy, one schedule, one executor.

    render_turn: for strategies that ask again; others need none. rng: a round's random stream.
    """

    def __init__(
        self,
        executor: Executor,
        schedule: SchedulePolicy,
        strategy: Strategy,
        aggregate: Aggregate,
        accounting: Accounting,
        clock: Callable[[], float] = time.perf_counter,
        render_turn: RenderTurn = lambda node, turn: None,
        rng: Callable[[SearchTree], Random] | None = None,
    ) -> None:
        self._executor, self._schedule, self._strategy = executor, schedule, strategy
        self._aggregate, self._accounting, self._clock = aggregate, accounting, clock
        self._render_turn = render_turn
        self._rng = rng or partial(round_rng, SearchSettings())

    def run(self, runs: Sequence[TreeRun], on_round: RoundCallback | None = None) -> None:
        """Grow every tree to its end.

        Raises:
            CapacityError: if the device cannot hold the search; all KV is freed first.
            PolicyError: if the strategy or the schedule asks for what cannot be done.
        """
        try:
            for run in runs:
                self._start(run, on_round)
            while going := [run for run in runs if not run.tree.done]:
                self._round(going)
                for run in going:
                    run.tree.rounds += 1
                    self._save(run)
                    self._apply(run, on_round)
        finally:
            for run in runs:
                run.tree.done = True
                self._executor.release(run.tree.release_dead())

    def _start(self, run: TreeRun, on_round: RoundCallback | None) -> None:
        """Decide what a tree begins, or goes on, with; a resumed one gets the KV for it."""
        run.started_s = self._clock()
        if run.tree.rounds == 0:
            self._save(run)
        self._apply(run, on_round)
        if run.restore is not None and not run.tree.done and run.tree.rounds > 0:
            run.restore([node for node in run.tree.held if node.state is not NodeState.OPEN])

    def _save(self, run: TreeRun) -> None:
        # Half a round depends on when the deadline struck, and is no place to resume from.
        if run.save is not None and not run.cut:
            run.save(run, run.total_s(self._clock()))

    def _round(self, runs: Sequence[TreeRun]) -> None:
        """One round of every tree: decode all open nodes group by group, then score them."""
        beams = _open_nodes(runs)
        for run in runs:
            run.round_tokens.append(_distinct_tokens(run.tree.open_nodes()))
        # Beams that were parked stay open, and are planned again.
        while going := _open_nodes(runs):
            with self._accounting.phase("schedule"):
                plan = planned(self._schedule, self._executor.view(going))
            for place, group in enumerate(plan.groups):
                later = plan.groups[place + 1 :]
                grouped = len(plan.groups) > 1
                self._executor.submit(DecodeWork(group, later, plan.write_back, grouped))
                if self._cut_off(runs):
                    break
            self._commit(runs)
        decoded = tuple(n for n in beams if n.state is NodeState.CANDIDATE and n.answers)
        self._executor.submit(VerifyWork(decoded))
        self._commit(runs)

    def _cut_off(self, runs: Sequence[TreeRun]) -> bool:
        """Between two groups: see if a deadline has passed; True if a tree was cut off.

        A tree without any candidate goes on: there is always something to return.
        """
        watched = [run for run in runs if run.rule is not None and run.rule.watches_clock]
        if not watched:
            return False
        self._commit(runs)
        now = self._clock()
        late = [
            run
            for run in watched
            if not run.cut
            and run.rule is not None
            and run.rule.out_of_time(run.here_s(now))
            and run.tree.open_nodes()
            and (run.tree.candidates() or run.tree.finished())
        ]
        for run in late:
            run.cut = True
        return bool(late)

    def _commit(self, runs: Sequence[TreeRun]) -> None:
        """Write events into the trees."""
        trees = {run.tree.root: run.tree for run in runs}
        for event in self._executor.wait():
            node = event.node
            if isinstance(event, StepDecoded):
                trees[node.root].commit(
                    node, event.token_ids, event.logprobs, event.stop, event.text, event.stats
                )
            elif isinstance(event, StepScored):
                node.step_score = event.score
                node.score = self._aggregate([step.step_score for step in node.reply()])
                check_path_score(node)

    def _apply(self, run: TreeRun, on_round: RoundCallback | None) -> None:
        """Let the strategy decide, obey, free what nobody needs, tell the caller."""
        tree = run.tree
        candidates = tuple(tree.candidates())
        with self._accounting.phase("schedule"):
            actions = self._decide(run)
        for action in actions:
            self._obey(tree, action)
        total_s = run.total_s(self._clock())
        for node in candidates:
            if node.state is NodeState.FINISHED:
                run.finished_s[node] = total_s
        if tree.done:
            run.ended_s = total_s
        self._executor.release(tree.release_dead())
        if on_round is not None and tree.rounds > 0:
            on_round(_report(run, candidates, total_s))

    def _obey(self, tree: SearchTree, action: Action) -> None:
        match action:
            case Extend(node, children, greedy):
                if node.state is NodeState.CANDIDATE:
                    tree.keep(node)
                tree.expand(node, children, greedy=greedy)
            case Ask(node, turn):
                token_ids = self._render_turn(node, turn)
                if token_ids is None:
                    tree.finish(node)
                else:
                    tree.keep(node)
                    tree.expand(tree.ask(node, turn, token_ids), 1)
            case Prune(node):
                tree.prune(node)
            case Complete(node):
                tree.finish(node)
            case Finish(reason):
                tree.done = True
                tree.reason_fewer = reason

    def _decide(self, run: TreeRun) -> list[Action]:
        """The strategy's actions, or the end of the search if something stops it."""
        tree, rule, elapsed_s = run.tree, run.rule, run.here_s(self._clock())
        whole = not run.cut or (rule is not None and rule.paths_stand_alone)
        actions = decided(self._strategy, tree, self._rng(tree)) if whole else []
        ends = not run.cut and any(isinstance(action, Finish) for action in actions)
        if rule is None or ends or tree.rounds == 0:
            return actions
        why = rule.why(tree, elapsed_s, actions, cut=run.cut)
        return actions if why is None else rule.ending(tree, why, actions)


def _open_nodes(runs: Sequence[TreeRun]) -> tuple[Node, ...]:
    return tuple(node for run in runs if not run.cut for node in run.tree.open_nodes())


def _distinct_tokens(beams: Sequence[Node]) -> int:
    """Tokens in the union of the beams' paths, the open steps left out."""
    nodes = {ancestor for beam in beams if beam.parent for ancestor in beam.parent.path()}
    return sum(len(node.token_ids) for node in nodes)


def _report(run: TreeRun, candidates: tuple[Node, ...], elapsed_s: float) -> RoundReport:
    def in_state(state: NodeState) -> tuple[Node, ...]:
        return tuple(node for node in candidates if node.state is state)

    return RoundReport(
        tree=run.tree,
        round=run.tree.rounds,
        candidates=candidates,
        survivors=in_state(NodeState.KEPT),
        pruned=in_state(NodeState.PRUNED),
        finished=in_state(NodeState.FINISHED),
        elapsed_s=elapsed_s,
    )
