"""From settings to the parts of a search: models, memory, tiers, schedule, verifier.

Everything that is loaded or allocated once, in the order in which the one memory number is spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from beamwright.attention import check_deterministic, make_attention
from beamwright.config import ModelSettings, ScheduleSettings, Settings
from beamwright.decode import RunningBatch
from beamwright.errors import DeviceMemoryError, InputError
from beamwright.kv import BlockPool, ByteBudget, HostedStore, KVLayout
from beamwright.layerwise import LayeredStore, LayerwiseAttention
from beamwright.models import LoadedModel, SharedBytes, TreeModel, load_model
from beamwright.models.device_memory import cap_memory, is_out_of_memory
from beamwright.models.load import check_device
from beamwright.progress import Progress
from beamwright.protocols import AttentionBackend, SchedulePolicy, Verifier
from beamwright.runtime.moving import MovingSplit
from beamwright.runtime.payoff import Payoff
from beamwright.runtime.threads import Threads
from beamwright.runtime.timeline import Timeline
from beamwright.runtime.trial import Trial
from beamwright.schedule import schedule_row
from beamwright.solver.memory import MemoryPlan, ModelBytes, plan_memory
from beamwright.solver.sparse import settled_sparse, sparse_attention
from beamwright.solver.split import moving_split, shared_bytes
from beamwright.solver.tiers import HostShares, chosen_schedule
from beamwright.sparse import HomeStore
from beamwright.verify import VerifierSource, resolve_verifier


@dataclass(frozen=True)
class Parts:
    """What a solver works with.

    loaded: the generator with its tokenizer; generator: the same with its KV. tree_models: every
    model that keeps KV, the generator first; backends: what each of them attends with. tier: None
    where all KV is on the device. shared: the memory of both, where it can move
    between them; moving: what moves it.
    """

    loaded: LoadedModel
    plan: MemoryPlan
    tier: HostShares | None
    schedule: SchedulePolicy
    backends: list[AttentionBackend]
    generator: TreeModel
    verifier: Verifier
    tree_models: list[TreeModel]
    shared: SharedBytes | None = None
    moving: MovingSplit | None = None

    @property
    def device_peak_bytes(self) -> int:
        """Most device KV of both at a time; where nothing has moved, the sum of their peaks."""
        if self.shared is not None and self.moving is not None and self.moving.counts.moves:
            return self.shared.used.peak_bytes
        return sum(model.store.device_peak_bytes for model in self.tree_models)


@dataclass(frozen=True)
class Machinery:
    """What all problems of a solver share, loaded or allocated once.

    exact: results do not depend on the batch. payoff, trial: what problems have taught of
    speculation, and of scoring beside decoding.
    """

    settings: ScheduleSettings
    parts: Parts
    batch: RunningBatch
    threads: Threads
    exact: bool
    timeline: Timeline
    progress: Progress
    payoff: Payoff = field(default_factory=Payoff)
    trial: Trial = field(default_factory=Trial)

    def stop_copiers(self) -> None:
        """Stop the link's threads; they start again when they are needed."""
        if self.parts.tier is not None:
            self.parts.tier.close()


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
    cap_memory(check_device(model.device), settings.memory.memory)
    progress.doing(f"loading the generator {model.model}")
    with _refusals_named(f"--model {model.model}"):
        loaded = load_model(model.model, model, chat_template=model.chat_template)
    # One precision for both models: attention is made for it.
    name = str(loaded.decoder.dtype).removeprefix("torch.")
    model = model.model_copy(update={"dtype": name})
    progress.doing(f"loading the verifier {model.verifier}")
    with _refusals_named(f"--verifier {model.scorer}"):
        source = resolve_verifier(model) if own is None else VerifierSource(None, None, own)
    if source.model is not None and loaded.codec is None:
        raise InputError(
            f"--verifier {model.scorer}: --model {model.model} has no tokenizer, so its "
            "steps have no text to score; use --verifier logprob or none"
        )
    sizes = None if source.model is None else _sizes(source.model)
    plan = plan_memory(settings.memory, _sizes(loaded), sizes, settings.search.n)
    sparse = settled_sparse(settings, _sizes(loaded), plan.generator_kv_bytes)
    settings = settings.model_copy(update={"sparse": sparse})
    home = sparse.sparse_home == "host"
    name = chosen_schedule(settings, _sizes(loaded), plan.generator_kv_bytes)
    scheduled = settings.schedule.model_copy(update={"schedule": name})
    row = schedule_row(scheduled)
    tier = None if row.resident and not home else HostShares.of(settings, plan, timeline)
    backend = make_attention(model.attention, loaded.decoder.device, loaded.decoder.dtype)
    backends, shared = [backend], None
    if model.deterministic:
        check_deterministic(backend, loaded.decoder.device, loaded.decoder.dtype)
    attention = sparse_attention(settings, loaded, backend, name)
    if row.streams_layers:
        backends = [_plain_attention(loaded, model)]
        generator = _hosted(LayeredStore, loaded, LayerwiseAttention(backends[0]), plan, tier)
    elif home:
        generator = _hosted(HomeStore, loaded, attention, plan, tier)
    else:
        host = None if tier is None else tier.of_generator()
        shared = None if sizes is None else shared_bytes(settings, plan)
        kv_bytes = plan.generator_kv_bytes
        generator = TreeModel(
            loaded.decoder, attention, kv_bytes, host=host, log=timeline, shared=shared
        )
    tree_models, verifier = [generator], source.without_model
    if source.model is not None:
        host = None if tier is None or home else tier.of_verifier()
        kv_bytes = plan.verifier_kv_bytes
        scorer = TreeModel(source.model.decoder, backend, kv_bytes, host=host, shared=shared)
        tree_models.append(scorer)
        backends.append(backend)
        verifier = source.on(scorer)
    assert verifier is not None
    policy = row.policy(scheduled)
    moving = None if shared is None else moving_split(settings, *tree_models)
    return Parts(
        loaded, plan, tier, policy, backends, generator, verifier, tree_models, shared, moving
    )


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
