"""The engine: plan, run, commit, select. Any number of trees in flight, each in a round of its own.

Data flows one way: problem -> tree -> plan -> device -> tree -> answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from beamwright.errors import BeamwrightError, LinkError
from beamwright.protocols import Executor, SchedulePolicy, StepDecoded, StepFailed, StepScored
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.obeyed import planned
from beamwright.runtime.scores import check_path_score
from beamwright.runtime.tree_run import TreeRun
from beamwright.tree import Node, NodeState


class Engine:
    """Runs trees to their end with one schedule and one executor.

    A tree is admitted, decided about, cancelled and finished, or fails, on its own. What one writes
    never depends on which others there are. One thread at a time may call it.
    """

    def __init__(
        self,
        executor: Executor,
        schedule: SchedulePolicy,
        accounting: Accounting,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor, self._schedule = executor, schedule
        self._accounting, self._clock = accounting, clock
        self._live: dict[Node, TreeRun] = {}
        self._changed = False

    @property
    def num_live(self) -> int:
        """Trees in flight."""
        return len(self._live)

    def run(self, runs: Sequence[TreeRun]) -> None:
        """Grow these trees to their end, all at a time; `TreeRun.error` says which could not be.

        Raises:
            LinkError: if the link has failed; all KV is freed first.
        """
        try:
            for run in runs:
                self.admit(run)
            while self._live:
                self.step()
        finally:
            self.abort()

    def admit(self, run: TreeRun) -> list[TreeRun]:
        """Take a tree in: decide what it begins, or goes on, with; itself if that is its end."""
        run.started_s = self._clock()
        # A newcomer is level with whoever was served least, not in front of all for long.
        run.served = min((each.served for each in self._live.values()), default=0)
        self._live[run.tree.root] = run
        if run.tree.rounds == 0:
            run.save_round(self._clock())
        self._decide(run)
        if run.restore is not None and not run.tree.done and run.tree.rounds > 0:
            with self._fails_alone(run):
                run.restore([node for node in run.tree.held if node.state is not NodeState.OPEN])
        return [run] if run.tree.done else []

    def cancel(self, run: TreeRun) -> None:
        """Give a tree up; its KV is freed at once."""
        if self._live.get(run.tree.root) is run:
            self._close(run)

    def abort(self) -> None:
        """Give all trees up; nothing runs any more when it returns."""
        try:
            for run in list(self._live.values()):
                self._close(run)
        finally:
            self._executor.close()

    def step(self) -> list[TreeRun]:
        """One bounded piece of work; returns the trees that have ended with it."""
        before = list(self._live.values())
        self._cut_overdue()
        waiting = self._waiting() if self._changed or not self._executor.busy else ()
        if waiting:
            with self._accounting.phase("schedule"):
                self._executor.submit(planned(self._schedule, self._executor.view(waiting)))
            self._changed = False
        for event in self._executor.wait():
            run = self._live.get(event.node.root)
            if run is not None:
                self._commit(run, event)
        for run in list(self._live.values()):
            if not run.open and not run.unscored:
                self._end_round(run)
        return [run for run in before if run.tree.done]

    # --- inside ------------------------------------------------------------------------------

    def _waiting(self) -> tuple[Node, ...]:
        """Open nodes, those of the tree that was served least in front: none waits for ever."""
        runs = sorted(self._live.values(), key=lambda run: run.served)
        running = self._executor.running
        return tuple(node for run in runs for node in run.open if node not in running)

    def _commit(self, run: TreeRun, event: StepDecoded | StepScored | StepFailed) -> None:
        """Write an event into its tree."""
        node = event.node
        if isinstance(event, StepDecoded):
            run.open.pop(node, None)
            run.served += len(event.token_ids)
            run.tree.commit(
                node, event.token_ids, event.logprobs, event.stop, event.text, event.stats
            )
        elif isinstance(event, StepScored):
            run.unscored.pop(node, None)
            with self._fails_alone(run):
                node.step_score = event.score
                node.score = run.aggregate([step.step_score for step in node.reply()])
                check_path_score(node)
        else:
            self._fail(run, event.error)

    def _end_round(self, run: TreeRun) -> None:
        """All steps are decoded: have them scored, then decide."""
        if not run.submitted:
            run.submitted = True
            run.unscored = dict.fromkeys(run.decoded())
            self._executor.verify(tuple(run.unscored))
        if run.unscored:
            return
        run.tree.rounds += 1
        run.save_round(self._clock())
        self._decide(run)

    def _decide(self, run: TreeRun) -> None:
        """Let the strategy decide, obey, free what nobody needs, report to the caller."""
        tree, clock = run.tree, self._clock
        candidates = tuple(tree.candidates())
        with self._fails_alone(run):
            with self._accounting.phase("schedule"):
                actions = run.decide(clock())
            for action in actions:
                run.obey(action)
        if run.error is not None:
            return
        total_s = run.note_ends(candidates, clock())
        self._executor.release(tree.release_dead())
        if tree.done:
            self._close(run)
        else:
            run.begin_round()
            self._changed = True
        if run.on_round is not None and tree.rounds > 0:
            run.on_round(run.report(candidates, total_s))

    def _cut_overdue(self) -> None:
        """Trees whose deadline has passed end their round with what is decoded.

        Where scores may never come, they go without those that are not in after a while.
        """
        now, patience_s = self._clock(), self._executor.patience_s
        for run in list(self._live.values()):
            if run.overdue(now):
                run.cut = True
                self._executor.cancel(tuple(run.open))
                run.open.clear()
            elif run.unscored and patience_s is not None and run.out_of_time(now - patience_s):
                run.cut = True
                run.unscored.clear()
                self._end_round(run)

    @contextmanager
    def _fails_alone(self, run: TreeRun) -> Iterator[None]:
        """What goes wrong with one tree ends that tree."""
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
        """A tree is over: nothing of it waits, runs or is held."""
        run.tree.done = True
        self._live.pop(run.tree.root, None)
        self._executor.cancel(tuple(run.open))
        run.open.clear()
        self._executor.release(run.tree.release_dead())
