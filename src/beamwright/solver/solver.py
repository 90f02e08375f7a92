"""Solver: generator + verifier + strategy. The public Python API.

Five lines solve a problem; a callback sees every round (`protocols.RoundReport`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Unpack, overload

from beamwright.config import Settings
from beamwright.decode.generator import make_running_batch
from beamwright.decode.sampling import stats_read_by
from beamwright.errors import (
    BeamwrightError,
    CapacityError,
    DeviceMemoryError,
    InputError,
    Interrupted,
    LinkError,
)
from beamwright.progress import Progress
from beamwright.protocols import RoundCallback, Strategy
from beamwright.runtime import Accounting, Engine, TreeRun
from beamwright.runtime.choice import Run, make_executor
from beamwright.runtime.limits import StopRule, check_stops, num_generated
from beamwright.runtime.obeyed import policy_name
from beamwright.runtime.prompts import Prompts, with_system_prompt
from beamwright.runtime.resume import restore_kv
from beamwright.runtime.selftest import batches_are_exact
from beamwright.runtime.threads import threads_for
from beamwright.runtime.timeline import NullTimeline, Timeline
from beamwright.saved.checkpoint import CheckpointWriter, read_checkpoint, tree_settings
from beamwright.schedule import schedule_row
from beamwright.search import SearchPolicy, round_rng
from beamwright.solver import calls
from beamwright.solver.assembly import assemble
from beamwright.solver.describe import describe, with_partial
from beamwright.solver.facts import Mark, RunFacts
from beamwright.solver.memory import advise
from beamwright.solver.options import SolverOptions, with_options
from beamwright.solver.own import settle
from beamwright.solver.solution import Solution
from beamwright.solver.tiers import Traffic
from beamwright.tree import SearchTree
from beamwright.verify import aggregate


class Solver:
    """Loads the models once and solves problems.

    Settings come as one object, or as the flat options of the command line:
    `Solver(model="bundled", search="beam", n=16, width=4, seed=7)`.
    strategy, schedule, verifier and stop take objects of the user's own (docs/extending.md);
    plugins: files that declare any of these by name.
    timeline: collects what ran when, and where each segment's KV was. progress: hears of phases
    and tokens while it loads and searches.

    Paths are `str` or `Path` everywhere. Calls from several threads run one after another; a call
    from a callback or a verifier of the same solver is an error.
    While it computes with small models it has torch use one thread (`threads`), and puts the number
    back that it found; with OMP_NUM_THREADS in the environment it leaves it alone.

    Raises:
        InputError: for a bad option, model or verifier.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
        strategy: Strategy | type[SearchPolicy] | None = None,
        plugins: Sequence[str | os.PathLike[str]] = (),
        **options: Unpack[SolverOptions],
    ) -> None:
        parts_given = {"strategy": strategy, "plugins": plugins, **options}
        self.settings, self.strategy, self._own = settle(settings, parts_given)
        own = self._own
        check_stops(self.settings.stop, self.settings.search)
        self.timeline, self.progress = timeline or NullTimeline(), progress or Progress()
        self._calls = calls.OneAtATime()
        parts = assemble(self.settings, self.timeline, own.scorer, self.progress)
        self._loaded, self._plan, self._tier = parts.loaded, parts.plan, parts.tier
        self.settings = with_system_prompt(self.settings, self._loaded.codec)
        self.schedule, self.verifier = own.schedule or parts.schedule, parts.verifier
        self.generator, self._tree_models = parts.generator, parts.tree_models
        scored = self.verifier.probabilities
        check_stops(self.settings.stop, self.settings.search, probabilities=scored)
        self._batch = make_running_batch(
            self.generator,
            self._loaded.codec,
            self.settings,
            token_stats=stats_read_by(self.verifier, self.strategy),
            grouped=schedule_row(self.settings.schedule).streams_layers,
            progress=self.progress,
        )
        dtype = str(self.generator.decoder.dtype).removeprefix("torch.")
        self._decisive = tree_settings(self.settings, dtype, own.identities())
        self._prompts = Prompts(self._loaded, self.settings.model)
        self._prompts.check_turns(self.strategy)
        decoders = [model.decoder for model in self._tree_models]
        self.threads = threads_for(max(each.shape.num_parameters for each in decoders))
        self.progress.doing("checking that results do not depend on the batch")
        with self.threads.in_use():
            self.exact = all(map(batches_are_exact, decoders, parts.backends))

    __signature__ = with_options(__init__)

    def close(self) -> None:
        """Stop the link's copier threads; the solver can still be used, and starts them again."""
        with self._calls.turn():
            self._stop_copiers()

    def _stop_copiers(self) -> None:
        if self._tier is not None:
            self._tier.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- solving -----------------------------------------------------------------------------

    def solve(
        self,
        problem: str,
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Solution:
        """Solve one problem.

        problem_id: part of the random stream's key, so equal ids and seeds give equal trees.
        checkpoint: file that holds the tree after every round, for `resume`.

        Raises:
            InputError: if the problem is empty or too long, or the checkpoint cannot be written;
            CapacityError: if KV runs out; DeviceMemoryError: if other memory does; LinkError: if
            the link fails; Interrupted: on Ctrl-C. What was finished is in the error's `partial`.
        """
        calls.check_problem(problem, problem_id)
        with self._calls.turn():
            tree = self._prompts.tree(problem_id, problem)
            return self._solve(self._begin(tree), on_round, checkpoint)

    def resume(
        self,
        file: str | os.PathLike[str],
        *,
        problem: str | None = None,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Solution:
        """Go on with a search from its checkpoint, to the tree that it would have grown anyway.

        Required with `dtype="float64"`; elsewhere KV that is computed again may flip a token in a
        million (docs/architecture.md, "Sameness"). Bytes and peaks are those of this process.
        problem: what the checkpoint has to be of. checkpoint: where to save further rounds.

        Raises:
            InputError: if the file is no whole checkpoint, or of other settings or another
            problem; otherwise as `solve`.
        """
        file = calls.as_path(file, "file")
        saved = read_checkpoint(file)
        saved.check_settings(file, self._decisive)
        with self._calls.turn():
            self._prompts.check(saved.tree, file, problem)
            run = self._begin(saved.tree)
            accounting = saved.progress(run)
            run.restore = partial(restore_kv, self.generator, self.verifier)
            self.progress.doing("computing the KV of the saved tree again")
            return self._solve(run, on_round, checkpoint, accounting)

    @overload
    def solve_many(
        self,
        problems: Iterable[calls.GivenProblem],
        *,
        in_flight: None = None,
        on_round: RoundCallback | None = None,
    ) -> list[Solution | BeamwrightError]: ...

    @overload
    def solve_many(
        self,
        problems: Iterable[calls.GivenProblem],
        *,
        in_flight: int,
        on_round: RoundCallback | None = None,
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]: ...

    def solve_many(
        self,
        problems: Iterable[calls.GivenProblem],
        *,
        in_flight: int | None = None,
        on_round: RoundCallback | None = None,
    ) -> list[Solution | BeamwrightError] | Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """Solve several problems with their trees in flight together.

        problems: texts, whose ids are then their places from 0, or (id, text) pairs. Equal ids and
        seeds give equal trees, here and in `solve`.
        in_flight: None for all at a time and a list in the order of the problems. With a number,
        so many at a time, and an iterator over (id, solution) as they finish; the next problem
        begins as soon as one has ended. Until it is exhausted or closed the solver is in use.

        A problem's own error takes its place, and the others are solved: bad input as
        InputError, KV that does not hold even this one search as CapacityError, logits or scores
        that are no numbers as NotFiniteError. Trees that do not fit together are solved in turn.

        Raises:
            InputError: if these are no problems.
        """
        pairs = calls.with_ids(problems)
        calls.check_callback(on_round)
        if in_flight is None:
            with self._calls.turn():
                found = dict(self._solve_pairs(pairs, max(1, len(pairs)), on_round))
            return [found[place] for place in range(len(pairs))]
        if in_flight < 1:
            raise InputError(f"in_flight must be at least 1, got {in_flight}")
        return self._as_they_finish(pairs, in_flight, on_round)

    def _as_they_finish(
        self,
        pairs: Sequence[tuple[str | int, str]],
        in_flight: int,
        on_round: RoundCallback | None,
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]:
        with self._calls.turn():
            for place, outcome in self._solve_pairs(pairs, in_flight, on_round):
                yield pairs[place][0], outcome

    def _solve_pairs(
        self,
        pairs: Sequence[tuple[str | int, str]],
        in_flight: int,
        on_round: RoundCallback | None,
    ) -> Iterator[tuple[int, Solution | BeamwrightError]]:
        """(place, outcome) as they finish; what did not fit beside others is tried alone."""
        good: dict[TreeRun, int] = {}
        for place, pair in enumerate(pairs):
            try:
                good[self._begin(self._prompts.tree(*pair))] = place
            except InputError as error:
                yield place, error
        alone: list[TreeRun] = []
        for run, outcome in self._run(good, in_flight, on_round):
            if isinstance(outcome, CapacityError | DeviceMemoryError) and len(good) > 1:
                alone.append(run)
            else:
                yield good[run], outcome
        for run in alone:
            again = self._begin(run.tree.bare())
            for _, outcome in self._run([again], 1, on_round):
                yield good[run], outcome

    def _stop_rule(self) -> StopRule:
        return StopRule(self.settings.stop, self.settings.search, self._own.stops)

    def synthetic(
        self,
        num_prompt_tokens: int,
        *,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Solution:
        """Search from a prompt of random token ids (benchmarks of random shapes).

        Raises:
            ProblemTooLongError: if the prompt fills the context.
        """
        with self._calls.turn():
            run = self._begin(self._prompts.synthetic(num_prompt_tokens))
            return self._solve(run, on_round, checkpoint)

    # --- inside ------------------------------------------------------------------------------

    def _solve(
        self,
        run: TreeRun,
        on_round: RoundCallback | None,
        checkpoint: str | os.PathLike[str] | None = None,
        accounting: Accounting | None = None,
    ) -> Solution:
        """Run one tree; raises its error.

        accounting: what earlier processes measured of it.
        """
        calls.check_callback(on_round)
        accounting = accounting or Accounting()
        if checkpoint is not None:
            file = calls.as_path(checkpoint, "checkpoint")
            run.save = CheckpointWriter(file, self._decisive, accounting)
        ((_, outcome),) = self._run([run], 1, on_round, accounting)
        if isinstance(outcome, BeamwrightError):
            raise outcome
        return outcome

    def _begin(self, tree: SearchTree) -> TreeRun:
        how = self.settings.search.aggregate or self.verifier.default_aggregate
        return TreeRun(
            tree,
            self.strategy,
            partial(aggregate, how=how),
            partial(round_rng, self.settings.search),
            self._prompts.turn,
            rule=self._stop_rule(),
        )

    def _run(
        self,
        runs: Iterable[TreeRun],
        in_flight: int,
        on_round: RoundCallback | None,
        accounting: Accounting | None = None,
    ) -> Iterator[tuple[TreeRun, Solution | BeamwrightError]]:
        """Run these trees to their end, so many at a time; a tree's own error is its outcome.

        accounting: what earlier processes measured of a tree that runs alone.
        """
        accounting = accounting or Accounting()
        for model in self._tree_models:
            model.store.reset_peaks()
        executor = make_executor(
            self.settings.schedule,
            Run(in_flight, self.exact, self.threads),
            self._batch,
            self.verifier,
            accounting,
            self._tree_models,
            self.timeline,
            self.progress,
        )
        engine = Engine(executor, self.schedule, accounting)
        waiting, marks = deque(runs), dict[TreeRun, Mark]()
        try:
            while waiting or engine.num_live:
                with self.threads.in_use():
                    ended: list[TreeRun] = []
                    while waiting and engine.num_live < in_flight and not ended:
                        run = waiting.popleft()
                        run.on_round = on_round
                        marks[run] = self._mark(accounting, fresh=len(marks) == 0)
                        ended += engine.admit(run)
                    ended = ended or engine.step()
                for run in ended:
                    facts = self._facts(run, marks.pop(run), accounting)
                    failed = run.error is not None
                    yield run, self._failed(run, facts) if failed else describe(run, facts)
        except (BeamwrightError, KeyboardInterrupt) as error:
            found = [(run, self._facts(run, mark, accounting)) for run, mark in marks.items()]
            engine.abort()
            stopped = self._stopped(error, found)
            if stopped is error:
                raise
            raise stopped from error
        finally:
            engine.abort()
            if engine.num_live or marks:
                self._batch.abort()

    def _mark(self, accounting: Accounting, *, fresh: bool) -> Mark:
        """All counters now. fresh: what was measured before belongs to this tree."""
        traffic = Traffic.now(self._tier, self._tree_models)
        seconds = {} if fresh else dict(accounting.seconds)
        groups = 0 if fresh else accounting.num_groups
        tokens = self._batch.counts.row_tokens
        now_s, h2d, d2h = time.perf_counter(), traffic.h2d_bytes, traffic.d2h_bytes
        return Mark(now_s, h2d, d2h, seconds, groups, tokens)

    def _facts(self, run: TreeRun, since: Mark, accounting: Accounting) -> RunFacts:
        """What was measured while a tree was in flight."""
        after = Traffic.now(self._tier, self._tree_models)
        drawn = self._batch.counts.row_tokens - since.tokens
        return RunFacts.of(
            self._tree_models,
            has_host=self._tier is not None,
            device_budget_bytes=self._plan.kv_bytes,
            generator_budget_bytes=self._plan.generator_kv_bytes,
            h2d_bytes=after.h2d_bytes - since.h2d_bytes,
            d2h_bytes=after.d2h_bytes - since.d2h_bytes,
            settings=self.settings,
            accounting=accounting.since(since.seconds, since.num_groups),
            total_s=time.perf_counter() - since.time_s + run.elapsed_s,
            total_generated=max(num_generated(run.tree), drawn),
            exact=self.exact,
            schedule=policy_name(self.schedule),
        )

    def _failed(self, run: TreeRun, facts: RunFacts) -> BeamwrightError:
        """The error of a tree that could not be finished, with what was."""
        assert run.error is not None
        self._stopped(run.error, [(run, facts)])
        return run.error

    def _stopped(
        self, error: BeamwrightError | KeyboardInterrupt, found: Sequence[tuple[TreeRun, RunFacts]]
    ) -> BeamwrightError | Interrupted:
        """What is raised for an error that ended these trees."""
        runs = [run for run, _ in found]
        advise(error, self.schedule.name, self.settings, self._plan, self._tree_models, runs)
        if isinstance(error, LinkError):
            self._stop_copiers()  # one that died starts afresh with the next problem
        return with_partial(error, found)
