"""Solver: generator + verifier + strategy. The public Python API.

Five lines solve a problem; a callback sees every round (`protocols.RoundReport`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from beamwright.attention import make_attention
from beamwright.attention.layerwise import LayerwiseAttention
from beamwright.config import Settings
from beamwright.errors import (
    BeamwrightError,
    CapacityError,
    InputError,
    Interrupted,
    ProblemTooLongError,
)
from beamwright.kv import ByteBudget
from beamwright.memory import ModelBytes, plan_memory
from beamwright.models import LoadedModel, TreeModel, load_model
from beamwright.protocols import AttentionBackend, RoundCallback, SchedulePolicy, Verifier
from beamwright.runtime import Accounting, SearchLoop, TorchExecutor, TreeRun
from beamwright.runtime.decode import StepDecoder
from beamwright.runtime.selftest import batches_are_exact
from beamwright.runtime.timeline import NullTimeline, Timeline
from beamwright.schedule import make_schedule
from beamwright.search import make_strategy, with_defaults
from beamwright.solution import RunFacts, Solution, describe, describe_finished
from beamwright.tiers import HostTier, Traffic, chosen_schedule, stalled_s
from beamwright.tree import SearchTree
from beamwright.verify import PrmVerifier, aggregate, resolve_verifier

_SYNTHETIC_SEED = 20_26


class Solver:
    """Loads the models once and solves problems.

    Settings come as one object, or as the flat options of the command line:
    `Solver(model="bundled", search="beam", n=16, width=4, seed=7)`.
    timeline: collects what ran when, and where each segment's KV was.

    Raises:
        InputError: for a bad option, model or verifier.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        timeline: Timeline | None = None,
        **options: Any,
    ) -> None:
        if settings is not None and options:
            raise InputError("give Solver either settings or options, not both")
        self.settings = with_defaults(settings or Settings.build(**options))
        self.strategy = make_strategy(self.settings.search)
        model = self.settings.model
        self._generator = load_model(model.model, model, chat_template=model.chat_template)
        source = resolve_verifier(model)
        if source.model is not None and self._generator.codec is None:
            raise InputError(
                f"--verifier {model.verifier}: --model {model.model} has no tokenizer, so its "
                "steps have no text to score; use --verifier logprob or none"
            )
        plan = plan_memory(
            self.settings.memory,
            _sizes(self._generator),
            _sizes(source.model) if source.model is not None else None,
            self.settings.search.n,
        )
        self._plan = plan
        schedule = chosen_schedule(self.settings, _sizes(self._generator), plan.generator_kv_bytes)
        self.schedule: SchedulePolicy = make_schedule(
            self.settings.schedule.model_copy(update={"schedule": schedule})
        )
        self.timeline = timeline or NullTimeline()
        self._tier = self._host_tier()
        backend = make_attention(model.attention)
        self.generator = self._generator_model(backend)
        self._tree_models = [self.generator]
        if source.spec is not None and source.model is not None:
            home = None
            if self._tier is not None:
                home = self._tier.options(self._tier.verifier_bytes)
            scorer = TreeModel(source.model.decoder, backend, plan.verifier_kv_bytes, home=home)
            self._tree_models.append(scorer)
            self.verifier: Verifier = PrmVerifier(source.spec, source.model, scorer)
        else:
            assert source.without_model is not None
            self.verifier = source.without_model
        self._decoder = StepDecoder(
            self.generator,
            self._generator.codec,
            self.settings.sampling,
            self.settings.step,
            self.settings.search.seed,
            reuse=self.settings.schedule.reuse,
            prefetch=self.settings.schedule.prefetch,
        )
        self.exact = all(batches_are_exact(m.decoder, backend) for m in self._tree_models)

    def close(self) -> None:
        """Stop the link's copier threads; the solver can still be used, and starts them again."""
        if self._tier is not None:
            self._tier.link.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _host_tier(self) -> HostTier | None:
        if self.schedule.name == "in-gpu":
            return None
        return HostTier.of(self.settings, self._plan, self.timeline)

    def _generator_model(self, backend: AttentionBackend) -> TreeModel:
        decoder, device_bytes = self._generator.decoder, self._plan.generator_kv_bytes
        if self._tier is None:
            return TreeModel(decoder, backend, device_bytes, log=self.timeline)
        if self.schedule.name == "layerwise":
            if decoder.device.type != "cpu":
                raise InputError(
                    "--schedule layerwise runs on a CPU only so far; use locality on a GPU"
                )
            # All KV is at home; the device holds whole layers of it, and two stream buffers.
            streamed = LayerwiseAttention(backend, ByteBudget(device_bytes), self._tier.link)
            return TreeModel(decoder, streamed, self._tier.generator_bytes)
        home = self._tier.options(self._tier.generator_bytes)
        return TreeModel(decoder, backend, device_bytes, home=home, log=self.timeline)

    # --- solving -----------------------------------------------------------------------------

    def solve(
        self, problem: str, *, problem_id: str | int = 0, on_round: RoundCallback | None = None
    ) -> Solution:
        """Solve one problem.

        problem_id: part of the random stream's key, so equal ids and seeds give equal trees.

        Raises:
            InputError: if the problem is empty or too long; CapacityError: if KV runs out;
            LinkError: if the link fails; Interrupted: on Ctrl-C. Finished candidates are in the
            error's `partial`.
        """
        return self._run([self._tree(problem_id, problem)], on_round)[0]

    def solve_many(
        self,
        problems: Sequence[tuple[str | int, str]],
        *,
        on_round: RoundCallback | None = None,
    ) -> list[Solution | BeamwrightError]:
        """Solve several (id, problem) pairs with their trees in flight together.

        A problem's own error stands in its place, and the others are solved: bad input as
        InputError, KV that does not hold even this one search as CapacityError. If the trees do
        not fit together they are solved one at a time.
        """
        found: dict[int, Solution | BeamwrightError] = {}
        good: list[int] = []
        for place, pair in enumerate(problems):
            try:
                self._tree(*pair)
                good.append(place)
            except InputError as error:
                found[place] = error

        def attempt(places: Sequence[int]) -> None:
            try:
                trees = [self._tree(*problems[place]) for place in places]
                found.update(zip(places, self._run(trees, on_round), strict=True))
            except CapacityError as error:
                found.update(dict.fromkeys(places, error))
                if len(places) > 1:
                    for place in places:
                        attempt([place])

        attempt(good)
        return [found[place] for place in range(len(problems))]

    def synthetic(
        self, num_prompt_tokens: int, *, on_round: RoundCallback | None = None
    ) -> Solution:
        """Search from a prompt of random token ids (benchmarks of random shapes).

        Raises:
            ProblemTooLongError: if the prompt fills the context.
        """
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
        vocab = self._generator.decoder.shape.vocab
        ids = torch.randint(vocab, (num_prompt_tokens,), generator=generator).tolist()
        self._check_length(len(ids))
        return self._run([SearchTree(0, tuple(ids), "")], on_round)[0]

    # --- inside ------------------------------------------------------------------------------

    def _run(self, trees: Sequence[SearchTree], on_round: RoundCallback | None) -> list[Solution]:
        accounting = Accounting()
        for model in self._tree_models:
            model.reset_peaks()
        before = Traffic.now(self._tier, self._tree_models)
        executor = TorchExecutor(
            self._decoder,
            self.verifier,
            accounting,
            lambda: stalled_s(self._tree_models),
            self.timeline,
        )
        how = self.settings.search.aggregate or self.verifier.default_aggregate
        loop = SearchLoop(
            executor, self.schedule, self.strategy, partial(aggregate, how=how), accounting
        )
        start = time.perf_counter()
        runs = [TreeRun(tree) for tree in trees]

        def facts() -> RunFacts:
            return self._facts(accounting, time.perf_counter() - start, trees, before)

        try:
            loop.run(runs, on_round)
        except (BeamwrightError, KeyboardInterrupt) as error:
            stopped = error if isinstance(error, BeamwrightError) else Interrupted()
            reason = str(error) or "interrupted"
            if len(runs) == 1:
                stopped.partial = describe_finished(runs[0], facts(), reason)
            self.close()  # a copier that died starts afresh with the next problem
            if stopped is error:
                raise
            raise stopped from error
        found = facts()
        return [describe(run, found) for run in runs]

    def _facts(
        self,
        accounting: Accounting,
        total_s: float,
        trees: Sequence[SearchTree],
        before: Traffic,
    ) -> RunFacts:
        models = self._tree_models
        after = Traffic.now(self._tier, models)
        return RunFacts(
            settings=self.settings,
            accounting=accounting,
            total_s=total_s,
            total_generated=sum(
                len(node.token_ids) for tree in trees for node in tree.nodes() if node.parent
            ),
            device_budget_bytes=self._plan.kv_bytes,
            device_peak_bytes=sum(model.device_peak_bytes for model in models),
            host_peak_bytes=sum(m.host_peak_bytes for m in models) if self._tier else None,
            h2d_bytes=after.h2d_bytes - before.h2d_bytes,
            d2h_bytes=after.d2h_bytes - before.d2h_bytes,
            scratch_peak_bytes=sum(model.store.scratch.peak_bytes for model in models),
            recomputed_tokens=sum(model.store.counts.recomputed_tokens for model in models),
            generator_budget_bytes=self._plan.generator_kv_bytes,
            kv_bytes_per_token=self.generator.store.pool.layout.bytes_per_token,
            exact=self.exact,
            schedule=self.schedule.name,
            attention=self.generator.backend.name,
        )

    def _tree(self, problem_id: str | int, problem: str) -> SearchTree:
        """A tree with the rendered prompt; space around a problem belongs to neither model."""
        codec, problem = self._generator.codec, problem.strip()
        if not problem:
            raise InputError("the problem is empty")
        if codec is None:
            raise InputError(
                f"--model {self.settings.model.model} has no tokenizer: use --prompt-tokens N"
            )
        ids = codec.render(problem, self.settings.model.system_prompt)
        self._check_length(len(ids))
        return SearchTree(problem_id, tuple(ids), problem)

    def _check_length(self, num_tokens: int) -> None:
        context = self._generator.decoder.shape.context
        if num_tokens >= context:
            raise ProblemTooLongError(
                f"the problem is {num_tokens} tokens long, the model's context is {context}"
            )


def _sizes(model: LoadedModel) -> ModelBytes:
    return ModelBytes(model.decoder.shape, model.decoder.dtype.itemsize)
