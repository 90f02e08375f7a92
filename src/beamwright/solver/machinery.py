"""The machinery of a solver: what all its problems share, loaded or allocated once, and its counts.

From settings to models, memory, tiers, schedule, verifier and batch, in the order in which the one
memory number is spent. Knows every room below and no problem (LBS, section 4; FlashTTS, 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from beamwright.attention import KERNEL_BACKENDS, check_deterministic, make_attention
from beamwright.attention.protocols import AttentionBackend, KVMethod
from beamwright.config import Settings
from beamwright.counters import Counters, Level, Progress, Usage
from beamwright.engine.batch import RunningBatch
from beamwright.engine.graphs import capture_passes
from beamwright.engine.moving import MovingSplit
from beamwright.engine.prompts import with_system_prompt
from beamwright.engine.row import Decoding
from beamwright.engine.selftest import kind, settle_rows
from beamwright.engine.speculation import Payoff
from beamwright.engine.tensor_rows import make_running_batch
from beamwright.engine.threads import all_threads, threads_for
from beamwright.engine.timeline import Timeline
from beamwright.errors import InputError
from beamwright.kv.link import Link, StreamLink, Wire
from beamwright.kv.pool import SharedMemory
from beamwright.kv.streams import CudaStreams, HostStreams
from beamwright.models.decoder import Decoder
from beamwright.models.digest import Digest
from beamwright.models.load import (
    LoadedModel,
    cap_memory,
    check_device,
    free_bytes,
    load_model,
    no_more_memory,
)
from beamwright.models.tree_model import HostOptions, TreeModel
from beamwright.models.weights import give_back
from beamwright.plan.costs import Roofline, Storage
from beamwright.protocols import (
    Direction,
    SchedulePolicy,
    Strategy,
    Verifier,
    stats_read_by,
    traits_of,
)
from beamwright.remote.writer import RemoteSteps, ServedSchedule
from beamwright.schedule import schedule_row
from beamwright.sections import ModelSettings
from beamwright.solver import memory, settled
from beamwright.solver.memory import MemoryPlan, ModelBytes
from beamwright.sparse.method import sparse_rule
from beamwright.sparse.rule import SparseRule
from beamwright.verify.find import VerifierSource, resolve_verifier

if TYPE_CHECKING:
    from beamwright.remote.generator import RemoteGenerator

_SMALLER = "take a smaller model, int8 or int4 weights, or a narrower --dtype"


@dataclass(frozen=True)
class HostShares:
    """The host tier of generator and verifiers: a link for each, over one wire, and its share.

    Counters of any link are of all.
    """

    generator: HostOptions
    verifiers: tuple[HostOptions, ...]

    @classmethod
    def of(cls, settings: Settings, plan: MemoryPlan, timeline: Timeline) -> HostShares:
        """The tier that the settings ask for, shared so that both models hold equally much."""
        schedule, device = settings.schedule, torch.device(settings.model.device)
        total, wire = memory.host_kv_bytes(settings), Wire(schedule.link_bandwidth)

        def link() -> Link:
            streams = CudaStreams(device) if device.type == "cuda" else HostStreams()
            return StreamLink(streams, timeline=timeline, wire=wire)

        generator = HostOptions(
            int(total * plan.tokens_part),
            link(),
            recompute=schedule.evict == "recompute",
            share_loads=schedule.inter_beam,
        )
        part, count = (total - generator.budget_bytes) // schedule.verifiers, schedule.verifiers
        parts = [replace(generator, budget_bytes=part, link=link()) for _ in range(count)]
        return cls(generator, tuple(parts))


class Machinery:
    """Loads the models, spends the memory number on them and their KV, and sees if they are exact.

    settings: with nothing left open; from here on nobody reads what was given. reader: what reads
    prompts. generator: the model with its KV, None where it is remote. verifiers: that score at a
    time, one as a rule, which `verifier` is; scorers: their models, over one copy of the weights.
    tier: None where all KV is on the device. shared: the memory of both models, where it can move
    between them; moving: what moves it. rule: of sparse decoding; why_sparse: why `auto` took it,
    or none. remote: the generator where it is not here. scored_by: the verifier's model as it was
    loaded. batch: writes the steps of all trees.

    exact: results of what runs here do not depend on the batch. token_stats: that are kept of every
    token. payoff: what problems have taught of speculation. not_captured: why steps are plain.

    Raises:
        InputError: for a bad model or verifier, or a memory number that does not hold them.
    """

    reader: LoadedModel | RemoteGenerator
    plan: MemoryPlan
    schedule: SchedulePolicy
    verifiers: Sequence[Verifier]
    generator: TreeModel | None = None
    scorers: Sequence[TreeModel] = ()
    tier: HostShares | None = None
    shared: SharedMemory | None = None
    moving: MovingSplit | None = None
    rule: SparseRule | None = None
    why_sparse: str | None = None
    remote: RemoteGenerator | None = None
    scored_by: LoadedModel | None = None

    def __init__(
        self,
        settings: Settings,
        verifier: Verifier | None,
        strategy: Strategy,
        timeline: Timeline,
        progress: Progress,
    ) -> None:
        """verifier: one that is the user's own, or declared. strategy: of the solver."""
        self.settings, self.timeline, self.progress = settings, timeline, progress
        self.payoff, model = Payoff(), settings.model
        cap_memory(check_device(model.device), settings.memory.memory)
        with all_threads().in_use():
            backends = self._find(verifier) if model.runs_elsewhere else self._load(verifier)
            self.token_stats = stats_read_by(self.verifier, strategy)
            self.not_captured: list[str] = []
            self.batch = self._make_batch()
        decoders = [model.decoder for model in self.tree_models]
        self.threads = threads_for(max((d.shape.num_parameters for d in decoders), default=0))
        progress.doing("checking that results do not depend on the batch")
        with self.threads.in_use():
            alike: dict[tuple[object, ...], list[Decoder]] = {}
            attends = {}
            for decoder, backend in zip(decoders, backends, strict=True):
                alike.setdefault(kind(decoder, backend), []).append(decoder)
                attends[kind(decoder, backend)] = backend
            # All of them: each learns how few rows it may be given.
            self.exact = all([settle_rows(alike[key], attends[key]) for key in alike])
        give_back()

    # --- loading -----------------------------------------------------------------------------

    def _load(self, verifier: Verifier | None) -> list[AttentionBackend]:
        """Both models here; returns what each of them attends with."""
        model = self.settings.model
        settled.check_layers(self.settings)
        self.progress.doing(f"loading the generator {model.model}")
        with no_more_memory(f"--model {model.model} cannot be loaded", _SMALLER):
            rendered = model.chat_template, model.template_args
            loaded = load_model(model.model, model, "generator", *rendered)
        self.reader, decoder = loaded, loaded.decoder
        # One precision for both models: attention is made for it.
        alike = model.model_copy(update={"dtype": str(decoder.dtype).removeprefix("torch.")})
        source = self._source(alike, verifier, loaded)
        if source.model is not None and loaded.codec is None:
            raise InputError(
                f"--verifier {model.scorer}: --model {model.model} has no tokenizer, so its "
                "steps have no text to score; use --verifier logprob or none"
            )
        self.settings = with_system_prompt(self.settings, loaded.codec)
        backend = self._attention(decoder)
        if self.settings.sparse.sparse == "auto":
            plan = self._planned(loaded, source.model, in_place=backend.name in KERNEL_BACKENDS)
            parts, scored_by = self.settings.schedule.verifiers, None
            if source.model is not None:
                scored_by = _sizes(source.model, parts=parts)
            known = loaded, backend, _sizes(loaded), plan, scored_by
            self.settings, self.why_sparse = settled.with_sparse(self.settings, *known)
        method = self._settle(loaded, source.model, in_place=backend.name in KERNEL_BACKENDS)
        settings = self.settings
        self.schedule = schedule_row(settings.schedule).policy(settings.schedule)
        self.rule = sparse_rule(settings.sparse)
        if method.has_tier:
            self.tier = HostShares.of(settings, self.plan, self.timeline)
        attention = method.attend(settings, backend, decoder) if method.attend else backend
        self.generator = TreeModel(
            decoder,
            attention,
            self.plan.generator_kv_bytes,
            host=None if self.tier is None else self.tier.generator,
            log=self.timeline,
            make_store=method.make_store,
            shared=self.shared,
        )
        hosts = () if self.tier is None else self.tier.verifiers
        backends = [attention.tested or attention, *self._add_scorers(source, hosts)]
        if self.shared is not None and self.scorers:
            self.moving = MovingSplit(
                self.generator.store,
                self.scorers[0].store,
                settings.step.longest,
                scores_early=settings.schedule.speculation != "off",
            )
        return backends

    def _find(self, verifier: Verifier | None) -> list[AttentionBackend]:
        """A remote generator; the verifier alone is here, and has all the memory."""
        from beamwright.remote.generator import RemoteGenerator  # noqa: PLC0415 (HTTP)

        self.progress.doing(f"looking for {self.settings.model.model}")
        self.reader = self.remote = RemoteGenerator.find(self.settings.model)
        self.settings = with_system_prompt(self.settings, self.remote.codec)
        self.schedule = ServedSchedule(settings=self.settings.schedule)
        self.plan, source = MemoryPlan(0, 0), self._source(self.settings.model, verifier)
        if source.model is None:
            return self._add_scorers(source, ())
        alone = self._planned(source.model, None, in_place=False)
        self.plan = MemoryPlan(0, alone.kv_bytes, tokens_part=0.0)
        self.tier = HostShares.of(self.settings, self.plan, self.timeline)
        return self._add_scorers(source, self.tier.verifiers)

    def _source(
        self, model: ModelSettings, verifier: Verifier | None, generator: LoadedModel | None = None
    ) -> VerifierSource:
        if verifier is not None:
            return VerifierSource(None, None, verifier)
        self.progress.doing(f"loading the verifier {model.verifier}")
        with no_more_memory(f"--verifier {model.scorer} cannot be loaded", _SMALLER):
            return resolve_verifier(model, generator)

    def _attention(self, decoder: Decoder) -> AttentionBackend:
        """What `--attention` names for this model."""
        model = self.settings.model
        backend = make_attention(model.attention, decoder.device, decoder.dtype)
        if model.deterministic:
            check_deterministic(backend, decoder.device, decoder.dtype)
        return backend

    def _add_scorers(
        self, source: VerifierSource, hosts: Sequence[HostOptions | None]
    ) -> list[AttentionBackend]:
        """The verifiers, with model and KV if they have any; returns what these attend with."""
        count = self.settings.schedule.verifiers
        if source.model is None:
            assert source.without_model is not None
            self.verifiers = [source.without_model]
            return []
        self.scored_by = source.model
        decoder, kv_bytes = source.model.decoder, self.plan.verifier_kv_bytes // count
        settled.check_verifiers(self.settings, decoder)
        backends = [self._attention(decoder) for _ in range(count)]
        self.scorers = [
            TreeModel(decoder, backend, kv_bytes, host=host, shared=self.shared)
            for backend, host in zip(backends, hosts or [None] * count, strict=True)
        ]
        self.verifiers = [source.on(scorer) for scorer in self.scorers]
        return backends

    def _make_batch(self) -> RunningBatch | RemoteSteps:
        settings, stats, remote = self.settings, self.token_stats, self.remote
        progress, said = self.progress, self.not_captured.append
        for model in self.tree_models:
            capture_passes(settings.schedule.graphs, model, said)
        if remote is None:
            assert self.generator is not None
            costs = Roofline(
                _sizes(self.generator).costs, settled.machine_profile(settings.model.device)
            )
            return make_running_batch(
                self.generator,
                self.reader.codec,
                settings,
                said,
                token_stats=stats,
                keeps_states=traits_of(self.verifier).reads_states,
                progress=progress,
                costs=costs.pass_costs(),
                rows_bytes=self.plan.rows_bytes,
                scorers=self.scorers,
            )
        if stats:
            raise InputError(
                f"--model {settings.model.model}: does not say {', '.join(sorted(stats))} of its "
                "tokens, which this search or verifier reads"
            )
        decoding = Decoding(settings.sampling, settings.step, settings.search.seed)
        return RemoteSteps(remote, decoding, settings.schedule.max_batch, progress)

    # --- the memory number -------------------------------------------------------------------

    def _settle(
        self, loaded: LoadedModel, verifier: LoadedModel | None, *, in_place: bool
    ) -> KVMethod:
        """Leave nothing open: what `auto` stands for, with these models and this memory.

        in_place: attention's kernels read KV where it is. Returns the generator's way to keep it.
        """
        named = settled.with_schedule(self.settings)
        method, sizes = settled.kv_method(named), _sizes(loaded)
        in_place = in_place and method.attend is None
        plan = self.plan = self._planned(
            loaded, verifier, in_place=in_place, tails_apart=method.tails_apart
        )
        self.settings = settled.with_most_rows(named, method, sizes, plan.generator_kv_bytes)
        # Memory moves between two models that keep their KV in pools of it.
        moves = method.make_store is None and named.schedule.verifiers == 1
        if moves and verifier is not None and isinstance(named.memory.split, str):
            most_block_bytes = max(model.block_bytes for model in (sizes, _sizes(verifier)))
            self.shared = SharedMemory(plan.kv_bytes, most_block_bytes)
        return method

    def _planned(
        self,
        loaded: LoadedModel,
        verifier: LoadedModel | None,
        *,
        in_place: bool,
        tails_apart: bool = True,
    ) -> MemoryPlan:
        """The memory number, spent."""
        free = free_bytes(loaded.decoder.device)
        on_card, count = free is not None, self.settings.schedule.verifiers
        alone = self.remote is not None  # it is the verifier's
        tails_apart = tails_apart and not on_card and not in_place
        return memory.plan_memory(
            self.settings.memory,
            _sizes(loaded, scores=on_card and alone, parts=count if alone else 1),
            None if verifier is None else _sizes(verifier, scores=on_card, parts=count),
            self.settings.search.n,
            in_place=in_place,
            free_bytes=None if free is None else free(),
            step_tokens=self.settings.step.longest if tails_apart else None,
        )

    def advice(self, schedule: str, settings: Settings, prompt_tokens: int) -> str:
        """What helps where device KV ran out in a search with these settings."""
        count = {"verifier": len(self.scorers)}
        sizes = [_sizes(m, parts=count.get(name, 1)) for name, m in dict(self.models).items()]
        return memory.advice(schedule, settings, self.plan.kv_bytes, sizes, prompt_tokens)

    # --- what there is -----------------------------------------------------------------------

    @property
    def verifier(self) -> Verifier:
        """The first, which all others are like."""
        return self.verifiers[0]

    @property
    def models(self) -> list[tuple[str, TreeModel]]:
        """All that keep KV here, each with what it does, the generator first."""
        generator = [] if self.generator is None else [("generator", self.generator)]
        return [*generator, *(("verifier", scorer) for scorer in self.scorers)]

    @property
    def tree_models(self) -> list[TreeModel]:
        """The same, in this order."""
        return [model for _, model in self.models]

    @property
    def dtype(self) -> str:
        """The generator's; where it is remote, nobody here knows."""
        dtype = "elsewhere" if self.generator is None else str(self.generator.decoder.dtype)
        return dtype.removeprefix("torch.")

    def identities(self) -> dict[str, Digest | None]:
        """Whose files the models are, None where they are none; waits until all have been read."""
        models = {"generator": self.reader, "verifier": self.scored_by or self.verifier}
        digests = {name: getattr(model, "digest", None) for name, model in models.items()}
        return {name: digest and digest.result() for name, digest in digests.items()}

    @property
    def device_peak_bytes(self) -> int:
        """Most device KV of both at a time; where nothing has moved, the sum of their peaks."""
        if self.shared is not None and self.moving is not None and self.moving.counts.moves:
            return self.shared.peak_bytes
        return sum(model.store.device_peak_bytes for model in self.tree_models)

    def counted(self) -> dict[str, Counters]:
        """What has been counted until now: of the "engine", and of each model's KV."""
        engine = self.batch.counts.copy()
        if self.tier is not None:
            moved = self.tier.generator.link.bytes_moved
            engine.h2d_bytes = moved.get(Direction.H2D, 0)
            engine.d2h_bytes = moved.get(Direction.D2H, 0)
        counted = {"engine": engine}
        for name, model in self.models:
            counted[name] = counted.get(name, Counters()) + model.store.counts
        return counted

    def usage(self) -> Usage:
        """What is held, and has been counted, by any thread."""
        used = Usage({}, self.counted())
        for name, model in self.models:
            tiers, counts = model.store.tiers.items(), model.store.counts
            levels = {(name, tier): Level(b.used_bytes, b.total_bytes) for tier, b in tiers}
            waited_s = model.store.stall_s - counts.transfer_wait_s
            used += Usage(levels, {name: Counters(transfer_wait_s=waited_s)})
        return used

    def stop_threads(self) -> None:
        """Stop the links' threads, and a remote generator's; they start again when needed."""
        if self.tier is not None:
            for host in (self.tier.generator, *self.tier.verifiers):
                host.link.close()
        if self.remote is not None:
            self.remote.close()


def _sizes(model: LoadedModel | TreeModel, *, scores: bool = False, parts: int = 1) -> ModelBytes:
    """storage: known of what was loaded; KV does not ask."""
    decoder, storage = model.decoder, getattr(model, "storage", Storage.PLAIN)
    kept = decoder.shape, decoder.dtype.itemsize, storage, decoder.kv_dtype
    return ModelBytes(*kept, scores, parts)
