"""Solver: generator, verifier and strategy. This is the public Python API.

Five lines solve a problem. A callback gets a `protocols.RoundReport` after every round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from beamwright.config import Settings
from beamwright.counters import Progress, Usage
from beamwright.engine.chains import restore_kv
from beamwright.engine.decisions import check_stops
from beamwright.engine.prompts import PromptRenderer
from beamwright.engine.timeline import NullTimeline, Timeline
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import BeamwrightError, InputError
from beamwright.models.digest import Digest
from beamwright.protocols import RoundCallback, Strategy, stats_read_by, traits_of
from beamwright.saved.checkpoint import CheckpointWriter, read_checkpoint
from beamwright.search import SearchPolicy
from beamwright.solver.handle import CallLock, Handle, Stream, SubmitQueue
from beamwright.solver.machinery import Machinery
from beamwright.solver.notebook import usual_progress
from beamwright.solver.options import ProblemOptions, RequestOptions, SolverOptions
from beamwright.solver.request import (
    GivenProblem,
    ProblemSettings,
    Request,
    ScoreOptions,
    check_problem,
    expect,
    read_paths,
    read_problems,
    take_priority,
)
from beamwright.solver.scheduler import Arrivals, RequestScheduler, arrivals_of
from beamwright.solver.solution import Candidate, Solution
from beamwright.tree import Problem
from beamwright.verify.find import declared_verifier


class Solver:
    """Loads the models once and solves problems.

    Settings are given as one object, or as the flat options of the command line:
    `Solver(model="bundled", search="beam", n=16, width=4, seed=7)`.

    strategy, verifier, stop: names, or the user's own objects (docs/guides/extend.md).
    plugins: files that declare strategies, verifiers and other parts by name.
    timeline: records the time of each operation, and where each segment's KV was.
    progress: gets phases and token counts to show; by default a line in a notebook's cell.
    codec: the generator's tokenizer; None without one. context: maximum tokens of a path.
    most_submitted: maximum number of problems of `submit` in flight; None (default): as many as
        keep the device busy.

    Paths are `str` or `Path` everywhere. Calls from several threads run one after another. A call
    from a callback or a verifier of the same solver is an error. During a call, torch uses one
    thread for small models, and for larger ones as many as CPU affinity and quota allow
    (`threads`), unless OMP_NUM_THREADS is set. The caller's own number is restored after the call.

    Raises:
        InputError: for a bad option, model or verifier.
    """

    roster = None  # a Solver has no replicas; a ClusterSolver has a roster of them

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
        given = {"strategy": strategy, "plugins": plugins, **options}
        problem = ProblemSettings.of_call(settings, given)
        self.strategy = problem.strategy
        self.most_submitted: int | None = None
        self.timeline, self.progress = timeline or NullTimeline(), progress or usual_progress()
        scorer = problem.parts.verifier or declared_verifier(problem.settings.model)
        made = Machinery(problem.settings, scorer, self.strategy, self.timeline, self.progress)
        self._machinery, self._default = made, problem.with_settings(made.settings)
        self.settings, self.generator, self.verifier = made.settings, made.generator, made.verifier
        self.schedule, self._readers = made.schedule, (made.reader, made.verifier_model)
        self.threads, self.exact, self.token_stats = made.threads, made.exact, made.token_stats
        self.codec, self.context = made.reader.codec, made.reader.context
        self.remote = made.remote
        vocab = made.reader.vocab
        self._prompts = PromptRenderer(self.codec, self.context, vocab, self.settings.model)
        self._check(self._default)
        self._calls = CallLock()
        self._queue = SubmitQueue(lambda arrivals: self._run(arrivals, self.most_submitted))
        self.progress.ended()

    def __repr__(self) -> str:
        model, search = self.settings.model, self.settings.search
        own = self._default.parts.verifier  # the user's object
        verifier = model.verifier if own is None else type(own).__name__
        shape = f"{search.search} n={search.n} width={search.width} seed={search.seed}"
        return f"<Solver {model.model}, verifier {verifier}, {shape}>"

    def close(self) -> None:
        """Cancel all searches, and stop all threads. The solver can still be used."""
        self._queue.close()
        self._calls.close_stream()
        with self._calls.hold():
            self._machinery.stop_threads()

    def usage(self) -> Usage:
        """Return the memory in use and the counts so far. Any thread may call this."""
        return self._machinery.usage()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- one problem -------------------------------------------------------------------------

    def solve(
        self,
        problem: Problem,
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        strategy: Strategy | type[SearchPolicy] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Solution:
        """Solve one problem.

        problem: a text, a `Conversation`, or a `RawPrompt`.
        problem_id: part of the random streams' key: equal ids and seeds give equal trees.
        checkpoint: file that gets the tree after every round, for `resume`; only for a text.
        strategy, options: replace the solver's own for this problem.

        Raises:
            InputError: if the problem is empty or too long, if an option is bad or can only be set
                for the whole solver, or if the checkpoint cannot be written.
            CapacityError: if KV runs out; DeviceMemoryError: if other memory does; LinkError: if
                the link fails; Interrupted: on Ctrl-C. The error's `partial` has the finished
                candidates.
        """
        asked = problem, problem_id, on_round, checkpoint
        return self._solve_alone(self._request(*asked, strategy=strategy, **options))

    def submit(
        self,
        problem: Problem,
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        strategy: Strategy | type[SearchPolicy] | None = None,
        **options: Unpack[ProblemOptions],
    ) -> Handle:
        """Solve a problem in the solver's thread, next to others; arguments as in `solve`.

        The handle waits for the result, and can cancel the search. Any thread may submit any number
        of problems. As many as keep the device busy are in flight; among the others, those with a
        larger `priority` are next. A deadline includes the time in the queue. The solver's thread
        calls `on_round`; if `on_round` raises, only this search ends.

        Raises:
            InputError: for a bad option. An error in the problem becomes the handle's result.
        """
        asked = problem, problem_id, on_round, checkpoint
        request = self._request(*asked, strategy=strategy, **options)
        request.submitted_s = time.perf_counter()
        return self._queue.submit(problem_id, request)

    def resume(
        self,
        file: str | os.PathLike[str],
        *,
        problem: str | None = None,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        strategy: Strategy | type[SearchPolicy] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Solution:
        """Continue a search from its checkpoint, to the same tree as without the interruption.

        With `dtype="float64"` the trees are equal. Otherwise recomputed KV may change one token in
        a million (docs/concepts/sameness.md). Bytes, groups and phases are of this process only;
        `time.total_s` includes earlier processes.

        problem: if given, the checkpoint must have this text.
        checkpoint: file to which the tree is saved after each further round.
        strategy, options: must be the same as when the search began.

        Raises:
            InputError: if the file is not a complete checkpoint, or has other settings or another
                problem. Other errors are those of `solve`.
        """
        expect(file, str | os.PathLike, "file: must be a str or a Path")
        file = Path(file)
        saved = read_checkpoint(file)
        asked = self._problem_settings({"strategy": strategy, **options}, saved.tree.root.now)
        saved.check_settings(file, asked.tree_settings(self._machinery.dtype))

        def begin(run: TreeRun) -> None:
            run.restore = partial(restore_kv, self.generator, self.verifier, run.judges)
            self.progress.doing("recomputing the KV of the saved tree")
            saved.restore_progress(run)

        saving = self._saving(checkpoint, asked)
        was = saved.tree.root.problem_text or len(saved.tree.root.token_ids)
        request = Request(lambda: saved.tree, asked, was, on_round, saving, prepare=begin)
        with self._calls.hold():
            self._prompts.check_resumed(saved.tree, file, problem, asked.settings.step.thinking)
        return self._solve_alone(request)

    def synthetic(
        self,
        num_prompt_tokens: int,
        *,
        on_round: RoundCallback | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Solution:
        """Search from a prompt of random token ids, for benchmarks of random models.

        Raises:
            ProblemTooLongError: if the prompt fills the context.
        """
        make_tree, asked = partial(self._prompts.make_random_tree, num_prompt_tokens), self._default
        saving = self._saving(checkpoint, asked)
        return self._solve_alone(Request(make_tree, asked, num_prompt_tokens, on_round, saving))

    # --- given steps -------------------------------------------------------------------------

    def score(
        self, problem: Problem, steps: Sequence[str], **options: Unpack[ScoreOptions]
    ) -> Candidate:
        """Score one given path with the verifier; return its candidate (`score_many`)."""
        (candidate,) = self.score_many(problem, [steps], **options)
        return candidate

    def score_many(
        self, problem: Problem, paths: Sequence[Sequence[str]], **options: Unpack[ScoreOptions]
    ) -> tuple[Candidate, ...]:
        """Score given paths with the verifier, and return them as candidates in order.

        The paths are scored next to submitted problems, but after a running `solve`, `resume` or
        `solve_many`. The arguments are those of `submit_score`.
        """
        self._calls.check_outside()
        handle = self.submit_score(problem, paths, **options)
        try:
            return handle.result().candidates
        finally:
            handle.cancel()

    def submit_score(
        self,
        problem: Problem,
        paths: Sequence[Sequence[str]],
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Handle:
        """Score given paths with the verifier, next to searches in flight, as `submit` solves.

        No token is generated, and no slot is needed: between two decode iterations, one step of
        each path is scored. The solution's candidates are the paths, in order, with a score for
        each step. Steps that several paths begin with are read once.

        paths: for each path, the texts of its steps; the last step ends the path. For steps of a
            tree (`node.step_text`), which have their delimiters, pass `delimiter=""`.

        Raises:
            InputError: if there is no verifier, or if it scores sampled tokens only
                (`Traits.reads_drawn`); for a bad path or option.
        """
        check_problem(problem, problem_id, on_round)
        self._check_reads_text()
        named, step = dict[str, Any](options), self._default.settings.step
        priority, delimiter = take_priority(named), named.pop("delimiter", None)
        own = step.delimiter if step.step_tokens is None else ""
        given = read_paths(paths, own if delimiter is None else delimiter)
        self._prompts.check_paths(given)
        asked = self._default.for_given_paths(len(given), max(map(len, given)), named)
        asked = asked.with_time(self._readers)
        request = Request(
            partial(self._prompts.make_tree, problem_id, problem, now=asked.settings.step.now),
            asked,
            problem,
            on_round,
            prepare=lambda run: run.add_given_paths(given),
            draws=False,
            priority=priority,
            submitted_s=time.perf_counter(),
        )
        return self._queue.submit(problem_id, request)

    # --- many problems -----------------------------------------------------------------------

    @overload
    def solve_many(
        self,
        problems: Iterable[GivenProblem],
        *,
        in_flight: None = None,
        on_round: RoundCallback | None = None,
        **options: Unpack[ProblemOptions],
    ) -> list[Solution | BeamwrightError]: ...

    @overload
    def solve_many(
        self,
        problems: Iterable[GivenProblem],
        *,
        in_flight: int | Literal["auto"],
        on_round: RoundCallback | None = None,
        **options: Unpack[ProblemOptions],
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]: ...

    def solve_many(
        self,
        problems: Iterable[GivenProblem],
        *,
        in_flight: int | Literal["auto"] | None = None,
        on_round: RoundCallback | None = None,
        **options: Unpack[ProblemOptions],
    ) -> list[Solution | BeamwrightError] | Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """Solve several problems with their trees in flight together.

        problems: texts, whose ids are their indices from 0, or (id, text) pairs, or (id, text,
            options) with options of that problem. Equal ids and seeds give equal trees, here and in
            `solve`. Problems with a larger `priority` begin and are decoded first.
        in_flight: None: all problems at once, and the result is a list in the order of the
            problems. A number is the maximum at once; "auto" is as many as keep the device busy.
            With either, the result is an iterator over (id, solution) in the order of completion,
            and the solver is in use until the iterator is exhausted or closed.
        options: replace the solver's own for these problems.

        A problem's own error takes the place of its solution: InputError for bad input,
        CapacityError if KV cannot hold even this search alone, NotFiniteError for logits or scores
        that are NaN or infinite. A search that does not fit next to others is run alone.

        Raises:
            InputError: if `problems` has another form, or an option is bad.
        """
        most = None if in_flight == "auto" else in_flight
        if most is not None and most < 1:
            raise InputError(f"in_flight must be at least 1, got {in_flight}")
        requests = {
            self._request(text, problem_id, on_round, **{**options, **its_own}): problem_id
            for problem_id, text, its_own in read_problems(problems)
        }
        if in_flight is None:
            outcomes = dict(self._run(arrivals_of(requests), max(1, len(requests))))
            return [outcomes[request] for request in requests]
        ended = self._calls.register_stream(self._run(arrivals_of(requests), most))
        return ((requests[request], outcome) for request, outcome in ended)

    def identities(self) -> dict[str, Digest | None]:
        """Return digests of the model files by role, in the format of receipts."""
        return self._machinery.identities()

    def prompt_tokens(self, problem: Problem) -> int:
        """Return the number of a prompt's tokens; raise InputError if it is bad. Thread-safe."""
        return len(self._prompts.make_tree(0, problem).root.token_ids)

    # --- inside ------------------------------------------------------------------------------

    def _problem_settings(self, options: dict[str, Any], now: str | None = None) -> ProblemSettings:
        """Return the solver's settings, changed by `options`. now: time for chat templates."""
        asked = self._default.changed(options)
        if asked is not self._default:
            self._check(asked)
        return asked.with_time(self._readers, now)

    def _check(self, asked: ProblemSettings) -> None:
        """Raise InputError for a problem's settings that the loaded models do not support."""
        search, scored = asked.settings.search, self.verifier.probabilities
        check_stops(asked.settings.stop, search, probabilities=scored)
        self._prompts.check_turns(asked.strategy, asked.settings.step.thinking)
        missing = ", ".join(sorted(stats_read_by(asked.strategy) - self.token_stats))
        if missing:
            raise InputError(
                f"search {search.search} needs {missing} of every token, which this Solver does "
                "not record. Create a Solver with this search."
            )

    def _check_reads_text(self) -> None:
        """Raise InputError if the verifier cannot score given texts."""
        own, name = self._default.parts.verifier, self.settings.model.verifier_or_default
        if own is None and name == "none":
            raise InputError("--verifier none scores no steps. Name a verifier.")
        if traits_of(self.verifier).reads_drawn:
            who = f"--verifier {name}" if own is None else f"verifier {getattr(own, 'name', name)}"
            raise InputError(
                f"{who} scores only sampled tokens, not given steps. Use another verifier."
            )

    def _request(
        self,
        problem: Problem,
        problem_id: str | int,
        on_round: RoundCallback | None,
        checkpoint: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Request:
        check_problem(problem, problem_id, on_round)
        priority, asked = take_priority(options), self._problem_settings(options)
        if checkpoint is not None and not isinstance(problem, str):
            raise InputError("checkpoint: the problem must be a text")
        step = asked.settings.step
        make_tree = partial(self._prompts.make_tree, problem_id, problem, step.thinking, step.now)
        saving = self._saving(checkpoint, asked)
        return Request(make_tree, asked, problem, on_round, saving, priority=priority)

    def _saving(
        self, checkpoint: str | os.PathLike[str] | None, asked: ProblemSettings
    ) -> CheckpointWriter | None:
        if checkpoint is None:
            return None
        expect(checkpoint, str | os.PathLike, "checkpoint: must be a str or a Path")
        return CheckpointWriter(Path(checkpoint), asked.tree_settings(self._machinery.dtype))

    def _solve_alone(self, request: Request) -> Solution:
        """Solve one request with no others in flight, or raise its error."""
        ((_, outcome),) = self._run(arrivals_of([request]), 1)
        if isinstance(outcome, BeamwrightError):
            raise outcome
        return outcome

    def _run(self, arrivals: Arrivals, in_flight: int | None = None) -> Stream:
        with self._calls.hold():
            # Read `self.schedule` at every run, because the user may have replaced it.
            scheduler = RequestScheduler(
                self._machinery, self.schedule, self._prompts.render_turn, in_flight
            )
            try:
                yield from scheduler.run(arrivals)
            finally:
                self.progress.ended()
