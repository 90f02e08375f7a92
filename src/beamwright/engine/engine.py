"""The engine loop: admit trees, decode and score their steps, and let strategies select.

Any number of trees is in flight, each in its own round of the search. Data flows one way: problem
-> tree -> plan -> device -> tree -> answer. Models and KV are behind the executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from beamwright.engine.admission import split_by_priority
from beamwright.engine.decisions import make_plan
from beamwright.engine.executor import Executor
from beamwright.engine.scoring import check_path_score
from beamwright.engine.speculation import Payoff
from beamwright.engine.timeline import PhaseTimer
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import BeamwrightError, InputError, LinkError, UnavailableError
from beamwright.protocols import (
    Event,
    SchedulePolicy,
    StepAwaited,
    StepDecoded,
    StepDropped,
    StepFailed,
    StepScored,
)
from beamwright.sections import Explore
from beamwright.tree import Node, NodeState


@dataclass(eq=False)
class Engine:
    """The loop that runs search trees to their end. Call `admit` for each, then `step` repeatedly.

    A tree can be cancelled or fail without affecting the others, and its tokens never depend on
    them. One thread at a time may call the engine.
    """

    _executor: Executor
    _schedule: SchedulePolicy
    _phase_timer: PhaseTimer
    clock: Callable[[], float] = time.perf_counter
    # Measurements of earlier runs, from which the engine decides whether speculation pays.
    payoff: Payoff = field(default_factory=Payoff)
    # "lockstep": no tree selects before all trees have decoded and scored their round.
    # "decoupled": a path whose next step needs no other path's score is decoded on before its round
    # is over, even while other trees run (Alg. 5 of decoupled tree exploration).
    explore: Explore = "continuous"
    # True: speculative steps may be scored before selection opens them (FlashTTS, section 4.1.3).
    # False: never, as in Alg. 4 of decoupled tree exploration.
    verify_ahead: bool = False
    listwise: bool = False  # True: all steps of a tree's round are scored in one call
    truncation: float = 0.85  # mean share of a sibling's tokens that a child copies (FlashTTS's R)
    # Grace period in seconds after a tree's deadline, while the tree has no result at all and waits
    # for steps of a remote writer, which may never come. None if steps surely come.
    steps_patience_s: float | None = None
    _live: dict[Node, TreeRun] = field(default_factory=dict, init=False)  # trees in flight, by root
    _plan_is_stale: bool = field(default=False, init=False)
    _speculation_is_stale: bool = field(default=False, init=False)
    # Speculative children of each tree with their potential, until an event changes the tree.
    _speculative_of: dict[TreeRun, list[tuple[float, list[Node]]]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        self._writer = self._executor.writer

    @property
    def num_open(self) -> int:
        """Number of steps of all trees that are being decoded or wait to be decoded."""
        return sum(len(run.round.open) for run in self._live.values())

    @property
    def num_live(self) -> int:
        """Number of trees in flight."""
        return len(self._live)

    def cancel(self, run: TreeRun) -> None:
        """Discard a tree and free its KV at once."""
        if self._live.get(run.tree.root) is run:
            self._close(run)

    def abort(self) -> None:
        """Discard all trees, stop the executor's threads, and return when they have ended."""
        try:
            for run in list(self._live.values()):
                self._close(run)
        finally:
            self._executor.close()

    # --- the loop ----------------------------------------------------------------------------

    def step(self) -> list[TreeRun]:
        """Run one decode iteration or take one batch of scores; return the trees that ended.

        Afterwards, steps of decoded rounds are submitted for scoring, and scored rounds select.
        """
        before = list(self._live.values())
        self._cut_overdue()
        for event in self._run_executor():
            run = self._live.get(event.node.root)
            if run is not None:
                self._commit_event(run, event)
        over = [run for run in self._live.values() if not run.round.is_unfinished]
        waits = self.explore == "lockstep" and len(over) < len(self._live)
        for run in over if not waits else [run for run in over if run.cut]:
            self._finish_round(run)
        if self._speculation_is_stale:
            self._speculate()
        return [run for run in before if run.tree.done]

    def admit(self, run: TreeRun) -> list[TreeRun]:
        """Admit a tree and make its first selection; return the tree if it ends at once."""
        run.clock, run.started_s = self.clock, self.clock()
        # A new tree starts with the largest count, so that new trees do not starve older ones.
        run.served = max((other.served for other in self._live.values()), default=0)
        self._live[run.tree.root] = run
        begun = bool(run.tree.root.children)
        if not begun:
            run.save_round()
        self._select(run)
        if run.restore is not None and not run.tree.done and begun:
            held = [node for node in run.tree.held if node.state is not NodeState.OPEN]
            with self._fails_alone(run):
                run.restore(held, partial(self._writer.free_outside_window, run.tree))
        return [run] if run.tree.done else []

    def _run_executor(self) -> list[Event]:
        """Let the schedule plan the waiting steps if they changed, and run the executor once."""
        waiting: tuple[Node, ...] = ()
        if self._plan_is_stale or not self._writer.busy:  # by priority, least served first
            runs = sorted(self._live.values(), key=lambda run: (-run.priority, run.served))
            running = self._writer.running_nodes
            waiting = tuple(node for run in runs for node in run.round.open if node not in running)
        if waiting:
            with self._phase_timer.phase("schedule"):
                plan = make_plan(self._schedule, self._writer.view(waiting))
                self._writer.submit(split_by_priority(plan, self._live.values()))
            self._plan_is_stale = False
        return self._executor.wait()

    def _commit_event(self, run: TreeRun, event: Event) -> None:
        """Apply an executor's event to its tree.

        The score of a speculative child is kept apart until selection opens the child.
        """
        node, is_speculative = event.node, event.node.speculative
        self._speculative_of.pop(run, None)
        if is_speculative and node not in run.speculative:
            return  # a late event of a discarded child
        match event:
            case StepDecoded():
                self._speculation_is_stale = True
                if not is_speculative:
                    run.round.open.pop(node, None)
                    run.served += len(event.token_ids)
                run.tree.commit(**vars(event))
            case StepScored() if is_speculative:
                run.speculative.scores[node] = event.score
            case StepScored():
                run.round.unscored.pop(node, None)
                self._speculation_is_stale = True
                self._set_score(run, node, event.score)
            case StepDropped() if is_speculative:
                run.speculative.remove(node)
                self._executor.release([node])
            case StepFailed() if not (
                is_speculative or run.round.postpone_score(node, event.error)
            ):
                self._fail(run, event.error)
            case StepAwaited() if (
                not is_speculative and run.is_out_of_time() and not run.is_overdue()
            ):
                # Only a tree without any step fails here. Other trees end their round in `step`.
                assert run.rule is not None
                self._fail(
                    run, InputError(f"{run.rule.deadline} before the prompt was read; raise it")
                )

    def _finish_round(self, run: TreeRun) -> None:
        """Submit the steps of a decoded round to the verifier; if all are scored, select."""
        self._speculative_of.pop(run, None)
        self._submit_for_scoring(run)
        if run.round.is_unfinished:
            return
        if not run.unjudged_candidates():  # these are extended within the same round
            run.tree.rounds += 1
        run.record_payoff(self.payoff, self._phase_timer.counts.copy(), alone=len(self._live) == 1)
        run.save_round()
        self._select(run)

    # --- inside ------------------------------------------------------------------------------

    def _select(self, run: TreeRun) -> None:
        """Apply the strategy's actions, free KV that no open path needs, and report the round."""
        tree = run.tree
        candidates = tuple(tree.candidates())
        with self._fails_alone(run):
            with self._phase_timer.phase("schedule"):
                actions = run.decide()
            run.apply(actions)
        if run.error is not None:
            return
        if self._writer.speculation == "truncate":
            for node, begun, share in run.copies_from_siblings(self.truncation):
                self._writer.start_from_sibling(node, begun, share)
        self._drop_unopenable(run)
        report = run.report(candidates)
        self._executor.release(tree.pop_dead())
        self._writer.free_outside_window(tree)
        if tree.done:
            self._close(run)
        else:
            run.begin_round(self._phase_timer.counts.copy())
            self._plan_is_stale = self._speculation_is_stale = True
        if run.on_round is not None and (candidates or tree.rounds > 0):
            run.on_round(report)

    def _submit_for_scoring(self, run: TreeRun) -> None:
        """Submit this round's steps that the verifier does not have yet."""
        steps, scored = run.take_to_score(), run.speculative.scores
        for node in [node for node in steps if node in scored]:
            steps.remove(node)
            self._set_score(run, node, scored.pop(node))
        if steps:
            run.round.unscored.update(dict.fromkeys(steps))
            run.round.num_submits += 1
            scores_ahead = self.verify_ahead and not self.listwise
            children = run.take_children_to_score(len(steps)) if scores_ahead else ()
            self._executor.verify((*steps, *children), run.priority)

    def _set_score(self, run: TreeRun, node: Node, score: float | None) -> None:
        with self._fails_alone(run):
            node.step_score = score
            node.score = run.aggregate([step.step_score for step in node.reply()])
            check_path_score(node)

    # --- speculation -------------------------------------------------------------------------

    def _speculate(self) -> None:
        """Choose children of decoded steps that the writer may decode in idle slots."""
        self._speculation_is_stale, writer = False, self._writer
        pays = writer.speculation != "auto" or (len(self._live) == 1 and self.payoff.pays)
        if writer.speculation == "off" or not (pays or self.explore == "decoupled"):
            self._speculative_of.clear()
            writer.speculate(())
            return
        if not pays:  # decoupled: speculate only for strategies that extend every step
            unsure = [run for run in self._live.values() if not run.traits.certain]
            self._speculative_of.update({run: [] for run in unsure})
        for run in [run for run in self._live.values() if run not in self._speculative_of]:
            if run.scores_early and not self.listwise:
                self._submit_for_scoring(run)
            if run.error is None:
                with self._fails_alone(run):
                    prospects = run.prospects()
                    # One child is decoded; its siblings begin with a share of its tokens.
                    if writer.speculation == "truncate":
                        prospects = [replace(prospect, children=1) for prospect in prospects]
                    self._speculative_of[run] = [
                        (prospect.potential, run.speculative.create_children(prospect))
                        for prospect in prospects
                    ]
        likely = [pair for run in self._live.values() for pair in self._speculative_of[run]]
        likely.sort(key=lambda pair: -pair[0])
        writer.speculate([child for _, children in likely for child in children])

    def _drop_unopenable(self, run: TreeRun) -> None:
        """Free speculative children that selection can no longer open."""
        left = run.speculative.pop_unopenable(run.tree)
        self.payoff.speculated += sum(node.usage["speculated"] for node in left)
        self._executor.release(left)

    # --- trees that end ----------------------------------------------------------------------

    def _cut_overdue(self) -> None:
        """End the round of trees whose deadline has passed, with the steps decoded so far.

        A user's verifier may never return: scores that are missing after its grace period are left
        out. A remote writer may never return: a tree without steps fails after `steps_patience_s`.
        """
        steps_s, scores_s = self.steps_patience_s, self._executor.scores_patience_s
        for run in list(self._live.values()):
            if run.is_overdue():
                run.cut = True
                self._writer.cancel(tuple(run.round.open))
                run.round.open.clear()
            elif run.round.unscored and scores_s is not None and run.is_out_of_time(scores_s):
                run.cut = True
                run.round.unscored.clear()
                self._finish_round(run)
            elif run.round.open and steps_s is not None and run.is_out_of_time(steps_s):
                assert run.rule is not None
                self._fail(
                    run,
                    UnavailableError(f"{run.rule.deadline} before the first step ended; raise it"),
                )

    @contextmanager
    def _fails_alone(self, run: TreeRun) -> Iterator[None]:
        """Fail only this tree if the block raises. An error of the link ends the whole run."""
        try:
            yield
        except LinkError:
            raise
        except BeamwrightError as error:
            self._fail(run, error)

    def _fail(self, run: TreeRun, error: BeamwrightError) -> None:
        run.error = run.error or error
        self._close(run)

    def _close(self, run: TreeRun) -> None:
        """Remove a tree from the engine: cancel its open steps, and free all its KV."""
        run.tree.done = True
        self._live.pop(run.tree.root, None)
        self._speculative_of.pop(run, None)
        self._writer.cancel(tuple(run.round.open))
        run.round.open.clear()
        self._drop_unopenable(run)
        self._executor.release(run.tree.pop_dead())
