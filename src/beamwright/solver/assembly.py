"""From settings to the parts of a search: models, memory, tiers, schedule, verifier.

Everything that is loaded or allocated once, in the order in which the one memory number is spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from beamwright.attention import KERNEL_BACKENDS, check_deterministic, make_attention
from beamwright.config import Settings
from beamwright.counters import Counters, Level, Usage
from beamwright.engine.concurrency import GiveWay, Threads, Trial
from beamwright.engine.moving import MovingSplit
from beamwright.engine.prompts import with_system_prompt
from beamwright.engine.request import Decoding
from beamwright.engine.selftest import threads_agree
from beamwright.engine.speculation import Payoff
from beamwright.engine.timeline import Timeline
from beamwright.errors import DeviceMemoryError, InputError
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.store import HostedStore
from beamwright.layerwise.backend import LayerwiseAttention
from beamwright.layerwise.store import LayeredStore
from beamwright.models import HostOptions, LoadedModel, SharedBytes, TreeModel, load_model
from beamwright.models.decoder import Decoder
from beamwright.models.device_memory import cap_memory, free_bytes, is_out_of_memory
from beamwright.models.load import check_device
from beamwright.progress import Progress
from beamwright.protocols import AttentionBackend, Direction, SchedulePolicy, StepWriter, Verifier
from beamwright.remote.generator import RemoteGenerator
from beamwright.remote.writer import ServedSchedule
from beamwright.schedule import schedule_row
from beamwright.sections import ModelSettings, ScheduleSettings
from beamwright.solver.memory import MemoryPlan, ModelBytes, path_needs, plan_memory
from beamwright.solver.sparse import settled_sparse, sparse_attention, with_most_rows
from beamwright.solver.split import moving_split, shared_bytes
from beamwright.solver.tiers import TYPICAL_PROMPT_TOKENS, HostShares, chosen_schedule
from beamwright.sparse import HomeStore
from beamwright.tree import Node
from beamwright.verify.find import VerifierSource, resolve_verifier


@dataclass(frozen=True)
class Parts:
    """What a solver works with.

    settings: with nothing left open; from here on nobody reads what was asked. loaded: the
    generator with its tokenizer; generator: the same with its KV, None where it runs elsewhere.
    scorer: the verifier's model, None where it has none; backends: what each of both attends with.
    tier: None where all KV is on the device. shared: the memory of both, where it can move between
    them; moving: what moves it.
    """

    settings: Settings
    loaded: LoadedModel | RemoteGenerator
    plan: MemoryPlan
    tier: HostShares | None
    schedule: SchedulePolicy
    backends: list[AttentionBackend]
    generator: TreeModel | None
    verifier: Verifier
    scorer: TreeModel | None
    shared: SharedBytes | None = None
    moving: MovingSplit | None = None

    @property
    def tree_models(self) -> list[TreeModel]:
        """Every model that keeps KV here, the generator first."""
        return [*self.models.values()]

    @property
    def models(self) -> dict[str, TreeModel]:
        """The same by what they do."""
        models = {"generator": self.generator, "verifier": self.scorer}
        return {name: model for name, model in models.items() if model is not None}

    @property
    def dtype(self) -> str:
        """The generator's; where it runs elsewhere, nobody here knows."""
        if self.generator is None:
            return "elsewhere"
        return str(self.generator.decoder.dtype).removeprefix("torch.")

    @property
    def device_peak_bytes(self) -> int:
        """Most device KV of both at a time; where nothing has moved, the sum of their peaks."""
        if self.shared is not None and self.moving is not None and self.moving.counts.moves:
            return self.shared.used.peak_bytes
        return sum(model.store.device_peak_bytes for model in self.tree_models)


class Writer(StepWriter, Protocol):
    """Writes the steps of all trees: the running batch, or what runs elsewhere."""

    counts: Counters
    graphs_failed: str | None

    def decode_as(self, root: Node, decoding: Decoding) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Machinery:
    """What all problems of a solver share, loaded or allocated once.

    exact: results of what runs here do not depend on the batch. payoff, trial: what problems have
    taught of speculation, and of scoring beside decoding.
    """

    parts: Parts
    batch: Writer
    threads: Threads
    exact: bool
    timeline: Timeline
    progress: Progress
    payoff: Payoff = field(default_factory=Payoff)
    trial: Trial = field(default_factory=Trial)

    @property
    def settings(self) -> ScheduleSettings:
        """How beams are arranged, settled."""
        return self.parts.settings.schedule

    def counted(self) -> dict[str, Counters]:
        """What has been counted until now: of the "engine", and of each model's KV."""
        parts, engine = self.parts, self.batch.counts.copy()
        if parts.tier is not None:
            moved = parts.tier.link.bytes_moved
            engine.h2d_bytes = moved.get(Direction.H2D, 0)
            engine.d2h_bytes = moved.get(Direction.D2H, 0)
        kept = {name: model.store.counts.copy() for name, model in parts.models.items()}
        return {"engine": engine, **kept}

    def usage(self) -> Usage:
        """What is held, and has been counted, by any thread."""
        levels, counters = {}, self.counted()
        for name, model in self.parts.models.items():
            counters[name].transfer_wait_s = model.store.stall_s
            for tier, budget in model.store.tiers.items():
                levels[name, tier] = Level(budget.used_bytes, budget.total_bytes)
        return Usage(levels, counters)

    def stop_threads(self) -> None:
        """Stop the link's threads, and a generator elsewhere's; they start again when needed."""
        if self.parts.tier is not None:
            self.parts.tier.close()
        if isinstance(self.parts.loaded, RemoteGenerator):
            self.parts.loaded.source.close()


def assemble(
    settings: Settings,
    timeline: Timeline,
    own: Verifier | None,
    progress: Progress,
) -> Parts:
    """Load the models and spend the memory number on them and their KV.

    own: a verifier that is the user's own, or declared.

    Raises:
        InputError: for a bad model or verifier, or a memory number that does not hold them.
    """
    model = settings.model
    for device in filter(
        None, (model.verifier_device, model.device)
    ):  # the last is the current one
        cap_memory(check_device(device), settings.memory.memory)
    if model.runs_elsewhere:
        return _beside_far(settings, timeline, own, progress)
    progress.doing(f"loading the generator {model.model}")
    with _refusals_named(f"--model {model.model}"):
        loaded = load_model(model.model, model, chat_template=model.chat_template)
    # One precision for both models: attention is made for it.
    name = str(loaded.decoder.dtype).removeprefix("torch.")
    model = model.model_copy(update={"dtype": name})
    source = _verifier_source(model, own, progress)
    if source.model is not None and loaded.codec is None:
        raise InputError(
            f"--verifier {model.scorer}: --model {model.model} has no tokenizer, so its "
            "steps have no text to score; use --verifier logprob or none"
        )
    backend = make_attention(model.attention, loaded.decoder.device, loaded.decoder.dtype)
    backends = [backend]
    in_place = backend.name in KERNEL_BACKENDS and settings.sparse.sparse == "off"
    settings = with_system_prompt(settings, loaded.codec)
    settings, plan, shared = _settled(settings, loaded, source.model, in_place=in_place)
    home, row = settings.sparse.sparse_home == "host", schedule_row(settings.schedule)
    tier = None if row.resident and not home else HostShares.of(settings, plan, timeline)
    if model.deterministic:
        check_deterministic(backend, loaded.decoder.device, loaded.decoder.dtype)
    attention = sparse_attention(settings, loaded, backend)
    if row.streams_layers:
        backends = [_plain_attention(loaded, model)]
        generator = _hosted(LayeredStore, loaded, LayerwiseAttention(backends[0]), plan, tier)
    elif home:
        generator = _hosted(HomeStore, loaded, attention, plan, tier)
    else:
        host = None if tier is None else tier.of_generator()
        kv_bytes = plan.generator_kv_bytes
        generator = TreeModel(
            loaded.decoder, attention, kv_bytes, host=host, log=timeline, shared=shared
        )
    scorer, verifier = None, source.without_model
    if source.model is not None:
        host = None if tier is None or home else tier.of_verifier()
        scorer = _scorer(model, source.model, plan.verifier_kv_bytes, host, shared)
        backends.append(scorer.backend)
        verifier = source.on(scorer)
    assert verifier is not None
    policy, moving = row.policy(settings.schedule), None
    if shared is not None and scorer is not None:
        moving = moving_split(settings, generator, scorer)
    return Parts(
        settings, loaded, plan, tier, policy, backends, generator, verifier, scorer, shared, moving
    )


def _settled(
    settings: Settings, loaded: LoadedModel, verifier: LoadedModel | None, *, in_place: bool
) -> tuple[Settings, MemoryPlan, SharedBytes | None]:
    """Settings with nothing left open: what `auto` stands for, with these models and this memory.

    Returns:
        They, the memory's plan, and the memory of both models where it can move.
    """
    plan = _plan(settings, loaded, verifier, in_place=in_place)
    sizes, kv_bytes = _sizes(loaded), plan.generator_kv_bytes
    sparse = settled_sparse(settings, sizes, kv_bytes)
    settings = with_most_rows(settings.model_copy(update={"sparse": sparse}), sizes, kv_bytes)
    shared, needs_turns = None, False
    if verifier is not None and settings.model.verifier_device is None:
        shared = shared_bytes(settings, plan)
        needed = path_needs(settings, sizes, _sizes(verifier), TYPICAL_PROMPT_TOKENS)
        needs_turns = shared is not None and needed[1] > plan.verifier_kv_bytes
    name = chosen_schedule(settings, sizes, kv_bytes, needs_turns=needs_turns)
    named = settings.schedule.model_copy(update={"schedule": name})
    row = schedule_row(named)
    settings = settings.model_copy(update={"schedule": row.settled(named)})
    if row.streams_layers and in_place:
        plan = _plan(settings, loaded, verifier, in_place=False)
    if row.streams_layers or sparse.sparse_home == "host":
        shared = None
    return settings, plan, shared


def _beside_far(
    settings: Settings, timeline: Timeline, own: Verifier | None, progress: Progress
) -> Parts:
    """The verifier alone is here, and has all the memory."""
    model = settings.model
    progress.doing(f"looking for {model.model}")
    far = RemoteGenerator.find(model)
    settings = with_system_prompt(settings, far.codec)
    source = _verifier_source(model, own, progress)
    policy = ServedSchedule(settings=settings.schedule)
    if source.model is None:
        assert source.without_model is not None
        nothing = MemoryPlan(0, 0)
        return Parts(settings, far, nothing, None, policy, [], None, source.without_model, None)
    alone = _plan(settings, source.model, None, in_place=False)
    plan = MemoryPlan(0, alone.kv_bytes, tokens_part=0.0)
    tier = HostShares.of(settings, plan, timeline)
    scorer = _scorer(model, source.model, plan.verifier_kv_bytes, tier.of_verifier())
    return Parts(
        settings, far, plan, tier, policy, [scorer.backend], None, source.on(scorer), scorer
    )


def _scorer(
    model: ModelSettings,
    loaded: LoadedModel,
    kv_bytes: int,
    host: HostOptions | None,
    shared: SharedBytes | None = None,
) -> TreeModel:
    """The verifier's model with its KV, where it was loaded."""
    decoder = loaded.decoder
    backend = make_attention(model.attention, decoder.device, decoder.dtype)
    if model.deterministic:
        check_deterministic(backend, decoder.device, decoder.dtype)
    return TreeModel(decoder, backend, kv_bytes, host=host, shared=shared)


def _plan(
    settings: Settings, loaded: LoadedModel, verifier: LoadedModel | None, *, in_place: bool
) -> MemoryPlan:
    """The memory number, spent; where the models are apart, on each device.

    in_place: attention's kernels read KV where it is.
    """

    def spent(one: LoadedModel, other: LoadedModel | None = None) -> MemoryPlan:
        free = free_bytes(one.decoder.device)
        return plan_memory(
            settings.memory,
            _sizes(one),
            None if other is None else _sizes(other),
            settings.search.n,
            in_place=in_place,
            free_bytes=None if free is None else free(),
        )

    if verifier is None or settings.model.verifier_device is None:
        return spent(loaded, verifier)
    part, other = _sizes(loaded).kv_per_token, _sizes(verifier).kv_per_token
    return MemoryPlan(spent(loaded).kv_bytes, spent(verifier).kv_bytes, part / (part + other))


def _verifier_source(
    model: ModelSettings, own: Verifier | None, progress: Progress
) -> VerifierSource:
    if own is not None:
        return VerifierSource(None, None, own)
    progress.doing(f"loading the verifier {model.verifier}")
    device = model.device
    if model.verifier_device is not None:
        model = model.model_copy(update={"device": model.verifier_device})
    with _refusals_named(f"--verifier {model.scorer}"):
        found = resolve_verifier(model)
    check_device(device)  # the current one again
    return found


def give_way(
    threads: Threads,
    kinds: Sequence[tuple[Decoder, AttentionBackend]],
    decoders: Sequence[Decoder],
) -> None:
    """Let large models leave cores to other processes, where that changes no bits.

    kinds: the first of each kind of models, and what it attends with.
    """
    if not threads.gives_way or any(decoder.device.type != "cpu" for decoder in decoders):
        return
    if all(threads_agree(*kind, threads.count) for kind in kinds):
        for decoder in decoders:
            decoder.before_layer = GiveWay(threads.count)


@contextmanager
def _refusals_named(option: str) -> Iterator[None]:
    """Memory that is refused while a model is read."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        hint = "take a smaller model, int8 or int4 weights, or a narrower --dtype"
        raise DeviceMemoryError(f"{option} cannot be loaded", hint) from error


def _plain_attention(loaded: LoadedModel, model: ModelSettings) -> AttentionBackend:
    """Attention that layer-wise offloading can wrap: kernels would read the pool themselves."""
    backend = make_attention(model.attention)
    if model.deterministic:
        check_deterministic(backend, loaded.decoder.device, loaded.decoder.dtype)
    return backend


def _hosted(
    kind: type[HostedStore],
    loaded: LoadedModel,
    attention: AttentionBackend,
    plan: MemoryPlan,
    tier: HostShares | None,
) -> TreeModel:
    """A generator with all KV on the host, whose store has its budget on the device."""
    assert tier is not None
    link, device_budget = tier.link, ByteBudget(plan.generator_kv_bytes)

    def make_store(layout: KVLayout, budget: ByteBudget, device: torch.device) -> HostedStore:
        pool = BlockPool(layout, budget, pinned=device.type == "cuda")
        return kind(pool, device, link, device_budget)

    return TreeModel(loaded.decoder, attention, tier.generator_bytes, make_store=make_store)


def _sizes(model: LoadedModel) -> ModelBytes:
    return ModelBytes(model.decoder.shape, model.decoder.dtype.itemsize, model.storage)
