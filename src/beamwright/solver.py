"""Solver: generator + verifier + strategy. The public Python API.

Five lines solve a problem; a callback sees every round (`protocols.RoundReport`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Unpack

from beamwright import calls
from beamwright.assembly import assemble
from beamwright.config import Settings
from beamwright.decode.generator import make_running_batch
from beamwright.decode.sampling import stats_read_by
from beamwright.describe import describe, with_partial
from beamwright.errors import (
    BeamwrightError,
    CapacityError,
    DeviceMemoryError,
    InputError,
    Interrupted,
)
from beamwright.memory import advise
from beamwright.own import settle
from beamwright.progress import Progress
from beamwright.protocols import RoundCallback, Strategy
from beamwright.runtime import Accounting, Engine, PlainExecutor, TreeRun
from beamwright.runtime.facts import RunFacts
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
from beamwright.solution import Solution
from beamwright.solver_options import SolverOptions, with_options
from beamwright.tiers import Traffic, stalled_s
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
        self._generator, self._plan, self._tier = parts.loaded, parts.plan, parts.tier
        self.settings = with_system_prompt(self.settings, self._generator.codec)
        self.schedule, self.verifier = own.schedule or parts.schedule, parts.verifier
        self.generator, self._tree_models = parts.generator, parts.tree_models
        scored = self.verifier.probabilities
        check_stops(self.settings.stop, self.settings.search, probabilities=scored)
        self._batch = make_running_batch(
            self.generator,
            self._generator.codec,
            self.settings,
            token_stats=stats_read_by(self.verifier, self.strategy),
            grouped=schedule_row(self.settings.schedule).streams_layers,
            progress=self.progress,
        )
        dtype = str(self.generator.decoder.dtype).removeprefix("torch.")
        self._decisive = tree_settings(self.settings, dtype, own.identities())
        self._prompts = Prompts(self._generator, self.settings.model)
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
            self._tier.link.close()

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

    def solve_many(
        self,
        problems: Iterable[calls.Problem],
        *,
        on_round: RoundCallback | None = None,
    ) -> list[Solution | BeamwrightError]:
        """Solve several problems with their trees in flight together.

        problems: texts, whose ids are then their places from 0, or (id, text) pairs. Equal ids and
        seeds give equal trees, here and in `solve`.

        A problem's own error stands in its place, and the others are solved: bad input as
        InputError, KV that does not hold even this one search as CapacityError, logits or scores
        that are no numbers as NotFiniteError. Trees that do not fit together are solved in turn.

        Raises:
            InputError: if these are no problems.
        """
        pairs = calls.with_ids(problems)
        with self._calls.turn():
            return self._solve_pairs(pairs, on_round)

    def _solve_pairs(
        self, pairs: Sequence[tuple[str | int, str]], on_round: RoundCallback | None
    ) -> list[Solution | BeamwrightError]:
        found: dict[int, Solution | BeamwrightError] = {}
        good: dict[int, SearchTree] = {}
        for place, pair in enumerate(pairs):
            try:
                good[place] = self._prompts.tree(*pair)
            except InputError as error:
                found[place] = error

        runs = {place: self._begin(tree.bare()) for place, tree in good.items()}
        together = self._run(list(runs.values()), on_round)
        found.update(zip(runs, together, strict=True))
        for place, outcome in found.items():
            if isinstance(outcome, CapacityError | DeviceMemoryError) and len(runs) > 1:
                alone = self._begin(good[place].bare())
                (found[place],) = self._run([alone], on_round)
        return [found[place] for place in range(len(pairs))]

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
        """Run one tree; raises its error."""
        (outcome,) = self._run([run], on_round, checkpoint, accounting)
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
        runs: Sequence[TreeRun],
        on_round: RoundCallback | None,
        checkpoint: str | os.PathLike[str] | None = None,
        accounting: Accounting | None = None,
    ) -> list[Solution | BeamwrightError]:
        """Run these trees to their end; a tree's own error stands in its place.

        checkpoint: of a tree that runs alone. accounting: what earlier processes measured of it.
        """
        calls.check_callback(on_round)
        accounting = accounting or Accounting()
        for model in self._tree_models:
            model.store.reset_peaks()
        before = Traffic.now(self._tier, self._tree_models)
        stall = partial(stalled_s, self._tree_models)
        executor = PlainExecutor(
            self._batch, self.verifier, accounting, stall, self.timeline, self.progress
        )
        engine = Engine(executor, self.schedule, accounting)
        for run in runs:
            run.on_round = on_round
        if checkpoint is not None:
            file = calls.as_path(checkpoint, "checkpoint")
            runs[0].save = CheckpointWriter(file, self._decisive, accounting)
        start = time.perf_counter()

        def facts() -> RunFacts:
            after = Traffic.now(self._tier, self._tree_models)
            return RunFacts.of(
                self._tree_models,
                has_host=self._tier is not None,
                device_budget_bytes=self._plan.kv_bytes,
                generator_budget_bytes=self._plan.generator_kv_bytes,
                h2d_bytes=after.h2d_bytes - before.h2d_bytes,
                d2h_bytes=after.d2h_bytes - before.d2h_bytes,
                settings=self.settings,
                accounting=accounting,
                total_s=time.perf_counter() - start + sum(run.elapsed_s for run in runs),
                total_generated=sum(num_generated(run.tree) for run in runs),
                exact=self.exact,
                schedule=policy_name(self.schedule),
            )

        try:
            with self.threads.in_use():
                engine.run(runs)
        except (BeamwrightError, KeyboardInterrupt) as error:
            stopped = self._stopped(error, runs, facts())
            if stopped is error:
                raise
            raise stopped from error
        except BaseException:
            self._batch.abort()
            raise
        found = facts()
        return [
            describe(run, found) if run.error is None else self._failed(run, found) for run in runs
        ]

    def _failed(self, run: TreeRun, facts: RunFacts) -> BeamwrightError:
        """The error of a tree that could not be finished, with what was."""
        assert run.error is not None
        self._stopped(run.error, [run], facts)
        return run.error

    def _stopped(
        self, error: BeamwrightError | KeyboardInterrupt, runs: Sequence[TreeRun], facts: RunFacts
    ) -> BeamwrightError | Interrupted:
        """What is raised for an error that ended these trees."""
        self._batch.abort()
        advise(error, self.schedule.name, self.settings, self._plan, self._tree_models, runs)
        self._stop_copiers()  # one that died starts afresh with the next problem
        return with_partial(error, runs, facts)
