"""From settings to the machinery of a search: models, memory, tiers, schedule, verifier, batch.

Everything that is loaded or allocated once, in the order in which the one memory number is spent.
Knows every room below and no problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from beamwright.attention import KERNEL_BACKENDS, check_deterministic, make_attention
from beamwright.config import Settings
from beamwright.engine.executor import threads_for
from beamwright.engine.prompts import with_system_prompt
from beamwright.engine.sampling import stats_read_by
from beamwright.engine.selftest import batches_are_exact, kind
from beamwright.engine.timeline import Timeline
from beamwright.errors import DeviceMemoryError, InputError
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.store import HostedStore
from beamwright.layerwise.backend import LayerwiseAttention
from beamwright.layerwise.store import LayeredStore
from beamwright.models.decoder import Decoder
from beamwright.models.load import (
    LoadedModel,
    cap_memory,
    check_device,
    free_bytes,
    is_out_of_memory,
    load_model,
)
from beamwright.models.tree_model import HostOptions, TreeModel
from beamwright.progress import Progress
from beamwright.protocols import AttentionBackend, Strategy, Verifier
from beamwright.remote.generator import RemoteGenerator
from beamwright.remote.writer import ServedSchedule
from beamwright.schedule import schedule_row
from beamwright.sections import ModelSettings
from beamwright.solver.machinery import Machinery, make_writer
from beamwright.solver.memory import MemoryPlan, ModelBytes, path_needs, plan_memory
from beamwright.solver.sparse import sparse_attention, with_most_rows
from beamwright.solver.tiers import (
    TYPICAL_PROMPT_TOKENS,
    HostShares,
    chosen_schedule,
    moving_split,
    shared_bytes,
)
from beamwright.sparse.host import HostStore
from beamwright.verify.find import VerifierSource, resolve_verifier


def assemble(
    settings: Settings,
    verifier: Verifier | None,
    strategy: Strategy,
    timeline: Timeline,
    progress: Progress,
) -> Machinery:
    """Load the models, spend the memory number on them and their KV, and see if they are exact.

    verifier: one that is the user's own, or declared. strategy: of the solver.

    Raises:
        InputError: for a bad model or verifier, or a memory number that does not hold them.
    """
    model = settings.model
    for device in filter(
        None, (model.verifier_device, model.device)
    ):  # the last is the current one
        cap_memory(check_device(device), settings.memory.memory)
    if model.runs_elsewhere:
        made, attention = _remote(settings, verifier, timeline, progress)
    else:
        made, attention = _local(settings, verifier, timeline, progress)
    made.token_stats = stats_read_by(made.verifier, strategy)
    made.batch = make_writer(made)
    decoders = [model.decoder for model in made.tree_models]
    made.threads = threads_for(max((d.shape.num_parameters for d in decoders), default=0))
    progress.doing("checking that results do not depend on the batch")
    with made.threads.in_use():
        kinds = {kind(*pair): pair for pair in zip(decoders, attention, strict=True)}
        made.exact = all(batches_are_exact(*pair) for pair in kinds.values())
    return made


def _local(
    settings: Settings, verifier: Verifier | None, timeline: Timeline, progress: Progress
) -> tuple[Machinery, list[AttentionBackend]]:
    """Both models here; and what each of them attends with."""
    model = settings.model
    progress.doing(f"loading the generator {model.model}")
    with _refusals_named(f"--model {model.model}"):
        loaded = load_model(model.model, model, chat_template=model.chat_template)
    # One precision for both models: attention is made for it.
    name = str(loaded.decoder.dtype).removeprefix("torch.")
    model = model.model_copy(update={"dtype": name})
    source = _verifier_source(model, verifier, progress)
    if source.model is not None and loaded.codec is None:
        raise InputError(
            f"--verifier {model.scorer}: --model {model.model} has no tokenizer, so its "
            "steps have no text to score; use --verifier logprob or none"
        )
    backend = make_attention(model.attention, loaded.decoder.device, loaded.decoder.dtype)
    in_place = backend.name in KERNEL_BACKENDS and settings.sparse.sparse == "off"
    settings = with_system_prompt(settings, loaded.codec)
    settings, plan, shared = _settled(settings, loaded, source.model, in_place=in_place)
    home, row = settings.sparse.sparse_home == "host", schedule_row(settings.schedule)
    tier = None if row.resident and not home else HostShares.of(settings, plan, timeline)
    if model.deterministic:
        check_deterministic(backend, loaded.decoder.device, loaded.decoder.dtype)
    attention, rule = sparse_attention(settings, loaded, backend)
    if row.streams_layers:
        # Kernels would read the pool themselves.
        backend = _checked(make_attention(model.attention), loaded.decoder, model)
        generator = _hosted(LayeredStore, loaded, LayerwiseAttention(backend), plan, tier)
    elif home:
        generator = _hosted(HostStore, loaded, attention, plan, tier)
    else:
        generator = TreeModel(
            loaded.decoder,
            attention,
            plan.generator_kv_bytes,
            host=None if tier is None else tier.generator,
            log=timeline,
            shared=shared,
        )
    backends, scorer, moving, scoring = [backend], None, None, source.without_model
    if source.model is not None:
        host = None if tier is None or home else tier.verifier
        scorer = _scorer(model, source.model, plan.verifier_kv_bytes, host, shared)
        backends.append(scorer.backend)
        scoring = source.on(scorer)
        moving = None if shared is None else moving_split(settings, generator, scorer)
    assert scoring is not None
    made = Machinery(
        settings,
        loaded,
        plan,
        tier,
        row.policy(settings.schedule),
        scoring,
        timeline,
        progress,
        generator=generator,
        scorer=scorer,
        shared=shared,
        moving=moving,
        rule=rule,
    )
    return made, backends


def _settled(
    settings: Settings, loaded: LoadedModel, verifier: LoadedModel | None, *, in_place: bool
) -> tuple[Settings, MemoryPlan, ByteBudget | None]:
    """Settings with nothing left open: what `auto` stands for, with these models and this memory.

    Returns:
        They, the memory's plan, and the memory of both models where it can move.
    """
    plan = _plan(settings, loaded, verifier, in_place=in_place)
    sizes, kv_bytes = _sizes(loaded), plan.generator_kv_bytes
    settings = with_most_rows(settings, sizes, kv_bytes)
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
    if row.streams_layers or settings.sparse.sparse_home == "host":
        shared = None
    return settings, plan, shared


def _remote(
    settings: Settings, verifier: Verifier | None, timeline: Timeline, progress: Progress
) -> tuple[Machinery, list[AttentionBackend]]:
    """The verifier alone is here, and has all the memory."""
    model = settings.model
    progress.doing(f"looking for {model.model}")
    remote = RemoteGenerator.find(model)
    settings = with_system_prompt(settings, remote.codec)
    source = _verifier_source(model, verifier, progress)
    plan, tier, scorer, scoring = MemoryPlan(0, 0), None, None, source.without_model
    if source.model is not None:
        alone = _plan(settings, source.model, None, in_place=False)
        plan = MemoryPlan(0, alone.kv_bytes, tokens_part=0.0)
        tier = HostShares.of(settings, plan, timeline)
        scorer = _scorer(model, source.model, plan.verifier_kv_bytes, tier.verifier)
        scoring = source.on(scorer)
    assert scoring is not None
    policy = ServedSchedule(settings=settings.schedule)
    made = Machinery(
        settings, remote, plan, tier, policy, scoring, timeline, progress,
        scorer=scorer, remote=remote,
    )  # fmt: skip
    return made, [] if scorer is None else [scorer.backend]


def _verifier_source(
    model: ModelSettings, verifier: Verifier | None, progress: Progress
) -> VerifierSource:
    if verifier is not None:
        return VerifierSource(None, None, verifier)
    progress.doing(f"loading the verifier {model.verifier}")
    device = model.device
    if model.verifier_device is not None:
        model = model.model_copy(update={"device": model.verifier_device})
    with _refusals_named(f"--verifier {model.scorer}"):
        source = resolve_verifier(model)
    check_device(device)  # the current one again
    return source


def _scorer(
    model: ModelSettings,
    loaded: LoadedModel,
    kv_bytes: int,
    host: HostOptions | None,
    shared: ByteBudget | None = None,
) -> TreeModel:
    """The verifier's model with its KV."""
    decoder = loaded.decoder
    backend = make_attention(model.attention, decoder.device, decoder.dtype)
    backend = _checked(backend, decoder, model)
    return TreeModel(decoder, backend, kv_bytes, host=host, shared=shared)


def _checked(backend: AttentionBackend, decoder: Decoder, model: ModelSettings) -> AttentionBackend:
    """Attention that is deterministic, where that was asked for."""
    if model.deterministic:
        check_deterministic(backend, decoder.device, decoder.dtype)
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
    link, device_budget = tier.generator.link, ByteBudget(plan.generator_kv_bytes)

    def make_store(layout: KVLayout, budget: ByteBudget, device: torch.device) -> HostedStore:
        pool = BlockPool(layout, budget, pinned=device.type == "cuda")
        return kind(pool, device, link, device_budget)

    budget_bytes = tier.generator.budget_bytes
    return TreeModel(loaded.decoder, attention, budget_bytes, make_store=make_store)


# --- the memory number ------------------------------------------------------------------------


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


def _sizes(model: LoadedModel) -> ModelBytes:
    return ModelBytes(model.decoder.shape, model.decoder.dtype.itemsize, model.storage)


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
