"""Machinery: what all problems of a solver share: models, memory plan, KV caches, batch, counters.

`Machinery` allocates memory within `--memory` in this order: models, KV tiers, schedule, verifier,
batch (LBS, section 4; FlashTTS, 4.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from beamwright.attention import KERNEL_BACKENDS, check_deterministic, make_attention
from beamwright.attention.protocols import AttentionBackend
from beamwright.config import Settings
from beamwright.counters import Counters, Progress, TierUsage, Usage
from beamwright.engine.batch import RunningBatch
from beamwright.engine.graphs import capture_prefills
from beamwright.engine.prompts import with_system_prompt
from beamwright.engine.row import DecodingSettings
from beamwright.engine.selftest import kernel_key, set_least_rows
from beamwright.engine.speculation import Payoff
from beamwright.engine.split import KVBudgetSplit
from beamwright.engine.tensor_rows import make_running_batch
from beamwright.engine.threads import all_threads, threads_for
from beamwright.engine.timeline import Timeline
from beamwright.errors import InputError
from beamwright.kv.link import StreamLink, Wire
from beamwright.kv.pool import SharedPoolMemory
from beamwright.kv.streams import CudaStreams, HostStreams
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.decoder import Decoder
from beamwright.models.digest import Digest
from beamwright.models.load import (
    LoadedModel,
    cap_memory,
    check_device,
    convert_memory_errors,
    load_model,
    make_free_memory_reader,
)
from beamwright.models.offload import WeightOffload
from beamwright.models.tree_model import HostOptions, TreeModel
from beamwright.models.weights import trim_heap
from beamwright.plan.costs import Roofline, Storage
from beamwright.protocols import (
    SAMPLING_MASS,
    Direction,
    SchedulePolicy,
    Strategy,
    Verifier,
    stats_read_by,
    traits_of,
)
from beamwright.remote.writer import RemoteSchedule, RemoteStepWriter
from beamwright.schedule import schedule_entry
from beamwright.sections import ModelSettings
from beamwright.solver import auto_settings
from beamwright.solver.memory import MemoryPlan, host_kv_bytes, plan_memory
from beamwright.solver.model_bytes import ModelBytes, Offloaded
from beamwright.solver.weights_home import make_offloads
from beamwright.sparse.method import sparse_rule
from beamwright.sparse.rule import SparseRule
from beamwright.verify.find import VerifierSource, resolve_verifier

if TYPE_CHECKING:
    from beamwright.remote.generator import RemoteGenerator

_SMALLER = "use a smaller model, int8 or int4 weights, or a narrower --dtype"


class Machinery:
    """Loaded models with their memory and KV caches, shared by all problems of a solver.

    settings: the settings with all `auto` values replaced by concrete ones.
    threads: the number of torch's threads, and the reason for this number.
    exact: True if the models are batch-invariant on this machine (`engine.selftest`).
    token_stats: names of the statistics (such as entropy) that are stored for every token.
    payoff: measurements, from earlier problems, of whether speculation saves time.
    not_captured: reasons why decode steps run without captured CUDA graphs.
    batch: decodes the steps of all trees: the running batch, or the client of a remote server.

    Raises:
        InputError: for a bad model or verifier, or if `--memory` is too small for both.
    """

    reader: LoadedModel | RemoteGenerator  # the generator, whose tokenizer encodes prompts
    schedule: SchedulePolicy
    # Verifiers that score concurrently, usually one. `scorers` are their models, which share one
    # copy of the weights.
    verifiers: Sequence[Verifier]
    sizes: Sequence[ModelBytes]  # sizes of the models in this process, the generator first
    plan = MemoryPlan(0, 0)
    generator: TreeModel | None = None  # the generator with its KV; None if it is remote
    scorers: Sequence[TreeModel] = ()
    # The host tier of each model, in the order of `sizes`; empty if all KV is on the device. All
    # tiers share one physical link, so each link's counters include the traffic of all models.
    tiers: Sequence[HostOptions] = ()
    shared: SharedPoolMemory | None = None  # KV memory that can move between the models
    moving: KVBudgetSplit | None = None  # moves `shared` memory from one model to the other
    rule: SparseRule | None = None  # the selection rule of sparse decoding
    why_sparse: str | None = None  # reason, as text, why `--sparse auto` chose its method
    # By role, the layers whose weights are not on the device.
    offloads: Mapping[str, WeightOffload] = MappingProxyType({})
    remote: RemoteGenerator | None = None  # the generator, if it is a remote server
    verifier_model: LoadedModel | None = None  # the verifier's model without KV, as loaded

    def __init__(
        self,
        settings: Settings,
        verifier: Verifier | None,
        strategy: Strategy,
        timeline: Timeline,
        progress: Progress,
    ) -> None:
        """verifier: the user's own or a declared verifier; None for one that the settings name.
        strategy: tells which token statistics must be stored.
        """
        self.settings, self.timeline, self.progress = settings, timeline, progress
        self.payoff, self.not_captured, model = Payoff(), list[str](), settings.model
        self.device = torch.device(check_device(model.device))
        self.wire = Wire(settings.schedule.link_bandwidth)  # between device and host
        cap_memory(model.device, settings.memory.memory)
        with all_threads().in_use():
            if model.runs_elsewhere:
                self._connect(verifier)
            else:
                self._load(verifier)
            kept = {SAMPLING_MASS} if model.sampled_logprobs else set()
            self.token_stats = stats_read_by(self.verifier, strategy) | kept
            self.batch = self._make_batch()
        models = self.tree_models
        parameters = [each.decoder.shape.num_parameters for each in models]
        self.threads = threads_for(max(parameters, default=0))
        progress.doing("checking that results do not depend on the batch")
        alike: dict[tuple[object, ...], list[TreeModel]] = {}
        for each in models:
            alike.setdefault(kernel_key(each.decoder, each.tested), []).append(each)
        with self.threads.in_use():
            # Test every group, even after one has failed, because the test also sets the minimum
            # number of rows that the group's models compute together.
            decoders = [([each.decoder for each in of], of[0].tested) for of in alike.values()]
            self.exact = all([set_least_rows(*group) for group in decoders])
        trim_heap()

    # --- loading -----------------------------------------------------------------------------

    def _load(self, verifier: Verifier | None) -> None:
        """Load both models, replace `auto` settings that depend on models, and divide memory."""
        model = self.settings.model
        auto_settings.check_layers(self.settings)
        free = make_free_memory_reader(self.device)
        self.offloads = make_offloads(
            self.settings, self.wire, None if free is None else free(), has_own=verifier is not None
        )
        self.progress.doing(f"loading the generator {model.model}")
        with convert_memory_errors(f"--model {model.model} cannot be loaded", _SMALLER):
            rendered = model.chat_template, model.template_args
            self.reader = loaded = load_model(
                model.model, model, "generator", *rendered, offload=self.offloads.get("generator")
            )
        decoder = loaded.decoder
        # Both models use one precision, because the attention backend is made for one dtype.
        alike = model.model_copy(update={"dtype": str(decoder.dtype).removeprefix("torch.")})
        source = self._verifier_source(alike, verifier, loaded)
        if source.model is not None and loaded.codec is None:
            raise InputError(
                f"--verifier {model.verifier_or_default}: --model {model.model} has no tokenizer, "
                "so its steps have no text to score. Use --verifier logprob or none."
            )
        self.settings = with_system_prompt(self.settings, loaded.codec)
        backend = self._attention(decoder)
        self.sizes = [_sizes(loaded), *self._verifier_sizes(source)]
        if self.settings.sparse.sparse == "auto":
            known = decoder, backend, self.sizes, self._plan(backend)
            self.settings, self.why_sparse = auto_settings.with_sparse(self.settings, *known)
        named = auto_settings.resolve_schedule(self.settings)
        method = auto_settings.kv_method(named)
        attend, tails_apart = method.attend, method.tails_apart
        self.plan = plan = self._plan(None if attend else backend, tails_apart=tails_apart)
        settings = auto_settings.with_row_limit(
            named, method, self.sizes[0], plan.generator_kv_bytes
        )
        self.settings, schedule = settings, settings.schedule
        self.schedule = schedule_entry(schedule).make_policy(schedule)
        self.rule = sparse_rule(settings.sparse)
        if method.has_tier:
            self.tiers = self._host_tiers()
        # Memory can move only between two models that keep their KV in pools of one memory.
        moves = method.make_store is None and schedule.verifiers == 1
        if moves and source.model is not None and isinstance(settings.memory.split, str):
            self.shared = SharedPoolMemory(
                plan.kv_bytes, max(size.block_bytes for size in self.sizes)
            )
        self.generator = TreeModel(
            decoder,
            attend(settings, backend, decoder) if attend else backend,
            plan.generator_kv_bytes,
            host=self.tiers[0] if self.tiers else None,
            log=self.timeline,
            make_store=method.make_store,
            shared=self.shared,
        )
        self._add_scorers(source)
        if self.shared is not None:
            self.moving = KVBudgetSplit(
                self.generator.store,
                self.scorers[0].store,
                settings.step.longest,
                scores_early=schedule.speculation != "off",
            )

    def _connect(self, verifier: Verifier | None) -> None:
        """Connect to a remote generator. The verifier runs here, and gets all the memory."""
        from beamwright.remote.generator import RemoteGenerator  # noqa: PLC0415 (HTTP)

        self.progress.doing(f"connecting to {self.settings.model.model}")
        self.reader = self.remote = RemoteGenerator.connect(self.settings.model)
        self.settings = with_system_prompt(self.settings, self.remote.codec)
        self.schedule = RemoteSchedule(settings=self.settings.schedule)
        source = self._verifier_source(self.settings.model, verifier)
        self.sizes = self._verifier_sizes(source)
        if self.sizes:
            self.plan = MemoryPlan(0, self._plan().kv_bytes, tokens_part=0.0)
            self.tiers = self._host_tiers()
        self._add_scorers(source)

    def _verifier_source(
        self, model: ModelSettings, verifier: Verifier | None, generator: LoadedModel | None = None
    ) -> VerifierSource:
        """Return the user's verifier, or the loaded model and format to make verifiers from."""
        if verifier is not None:
            return VerifierSource(None, None, verifier)
        self.progress.doing(f"loading the verifier {model.verifier}")
        with convert_memory_errors(
            f"--verifier {model.verifier_or_default} cannot be loaded", _SMALLER
        ):
            return resolve_verifier(model, generator, self.offloads.get("verifier"))

    def _attention(self, decoder: Decoder) -> AttentionBackend:
        """Return the attention backend that `--attention` names for this model."""
        model = self.settings.model
        backend = make_attention(model.attention, decoder.device, decoder.dtype)
        if model.deterministic:
            check_deterministic(backend, decoder.device, decoder.dtype)
        return backend

    def _add_scorers(self, source: VerifierSource) -> None:
        """Make the verifiers, with their models and KV if they have any.

        Raises:
            InputError: for several verifiers over a model that only one thread may call.
        """
        if source.model is None:
            assert source.without_model is not None
            self.verifiers = [source.without_model]
            return
        self.verifier_model, count = source.model, self.settings.schedule.verifiers
        decoder, kv_bytes = source.model.decoder, self.plan.verifier_kv_bytes // count
        if count > 1 and isinstance(decoder, AdaptedDecoder):
            why = "runs transformers' modules in one thread only. Use --verifiers 1."
            name = self.settings.model.verifier_or_default
            raise InputError(f"--verifiers {count} is not possible: --verifier {name} {why}")
        self.scorers = [
            TreeModel(decoder, self._attention(decoder), kv_bytes, host=host, shared=self.shared)
            for host in self.tiers[1:] or repeat(None, count)
        ]
        self.verifiers = [source.make_verifier(scorer) for scorer in self.scorers]

    def _make_batch(self) -> RunningBatch | RemoteStepWriter:
        """Create the writer of steps: the running batch, or the client of a remote server."""
        settings, stats, remote = self.settings, self.token_stats, self.remote
        for model in self.tree_models:
            capture_prefills(settings.schedule.graphs, model, self.not_captured.append)
        if remote is None:
            assert self.generator is not None
            costs = replace(self.sizes[0], storage=Storage.PLAIN).costs
            profile = auto_settings.machine_profile(settings.model.device)
            return make_running_batch(
                self.generator,
                self.reader.codec,
                settings,
                self.not_captured.append,
                token_stats=stats,
                keeps_states=traits_of(self.verifier).reads_states,
                progress=self.progress,
                costs=Roofline(costs, profile).pass_costs(),
                rows_bytes=self.plan.rows_bytes,
                scorers=self.scorers,
            )
        if stats:
            raise InputError(
                f"--model {settings.model.model} runs on a server, which does not report the "
                f"{', '.join(sorted(stats))} of its tokens. Use a local model, or another "
                f"{'--verifier' if stats_read_by(self.verifier) else '--search'}."
            )
        decoding = DecodingSettings(settings.sampling, settings.step, settings.search.seed)
        return RemoteStepWriter(remote, decoding, settings.schedule.max_batch, self.progress)

    # --- the memory number -------------------------------------------------------------------

    def _verifier_sizes(self, source: VerifierSource) -> list[ModelBytes]:
        """Return the sizes of the verifier's model in a list; an empty list if it has no model."""
        scores, parts = self.device.type == "cuda", self.settings.schedule.verifiers
        models = [] if source.model is None else [source.model]
        return [_sizes(model, scores=scores, parts=parts) for model in models]

    def _plan(
        self, backend: AttentionBackend | None = None, *, tails_apart: bool = True
    ) -> MemoryPlan:
        """Divide `--memory` into KV budgets.

        backend: the attention backend, if its kernels may read KV in place; otherwise None.
        tails_apart: True if the rows' tails are kept outside the blocks.
        """
        settings, free = self.settings, make_free_memory_reader(self.device)
        in_place = backend is not None and backend.name in KERNEL_BACKENDS
        tails_apart = tails_apart and free is None and not in_place
        return plan_memory(
            settings.memory,
            self.sizes[0],
            self.sizes[1] if len(self.sizes) > 1 else None,
            settings.search.n,
            in_place=in_place,
            free_bytes=None if free is None else free(),
            step_tokens=settings.step.longest if tails_apart else None,
        )

    def _host_tiers(self) -> list[HostOptions]:
        """Return the host tier of each model, with room for equally many tokens of each."""
        schedule, count = self.settings.schedule, self.settings.schedule.verifiers
        total = host_kv_bytes(self.settings)
        own = int(total * self.plan.tokens_part)
        on_card = self.device.type == "cuda"

        def tier(num_bytes: int) -> HostOptions:
            streams = CudaStreams(self.device) if on_card else HostStreams()
            link = StreamLink(streams, timeline=self.timeline, wire=self.wire)
            return HostOptions(num_bytes, link, schedule.evict == "recompute", schedule.inter_beam)

        return [tier(own), *(tier((total - own) // count) for _ in range(count))]

    # --- models, counters and threads --------------------------------------------------------

    @property
    def verifier(self) -> Verifier:
        """The first verifier; all others are equal to it."""
        return self.verifiers[0]

    @property
    def models(self) -> list[tuple[str, TreeModel]]:
        """All models that keep KV here, with their roles, the generator first."""
        generator = [] if self.generator is None else [("generator", self.generator)]
        return [*generator, *(("verifier", scorer) for scorer in self.scorers)]

    @property
    def tree_models(self) -> list[TreeModel]:
        """All models that keep KV here, the generator first."""
        return [model for _, model in self.models]

    @property
    def dtype(self) -> str:
        """The generator's dtype; "elsewhere" for a remote server, whose dtype is unknown."""
        dtype = "elsewhere" if self.generator is None else str(self.generator.decoder.dtype)
        return dtype.removeprefix("torch.")

    def identities(self) -> dict[str, Digest | None]:
        """Return the digests of the models' files; None for a model without files.

        The call waits until all files have been read.
        """
        models = {"generator": self.reader, "verifier": self.verifier_model or self.verifier}
        digests = {name: getattr(model, "digest", None) for name, model in models.items()}
        return {name: digest and digest.result() for name, digest in digests.items()}

    def copy_counters(self) -> dict[str, Counters]:
        """Return copies of all counters: of the "engine", and of each model's KV by role."""
        engine = self.batch.counts.copy()
        if self.tiers:
            moved = self.tiers[0].link.bytes_moved
            engine.h2d_bytes = moved.get(Direction.H2D, 0)
            engine.d2h_bytes = moved.get(Direction.D2H, 0)
        counted = {"engine": engine}
        for name, model in self.models:
            counted[name] = counted.get(name, Counters()) + model.store.counts
        for name, offload in self.offloads.items():
            counted[name].weight_bytes = offload.bytes_moved
        return counted

    def usage(self) -> Usage:
        """Return the memory in use and the counts so far. Any thread may call this."""
        used = Usage({}, self.copy_counters())
        for name, model in self.models:
            tiers, counts = model.store.tiers.items(), model.store.counts
            levels = {(name, tier): TierUsage(b.used_bytes, b.total_bytes) for tier, b in tiers}
            waited_s = model.store.stall_s - counts.transfer_wait_s
            used += Usage(levels, {name: Counters(transfer_wait_s=waited_s)})
        return used

    def stop_threads(self) -> None:
        """Stop the threads of links and of a remote generator. The next use restarts them."""
        for tier in self.tiers:
            tier.link.close()
        for offload in self.offloads.values():
            offload.close()
        if self.remote is not None:
            self.remote.close()


def _sizes(model: LoadedModel, *, scores: bool = False, parts: int = 1) -> ModelBytes:
    """Return the byte sizes of a loaded model: weights, KV and working memory."""
    decoder = model.decoder
    kept = decoder.shape, decoder.dtype.itemsize, model.storage, decoder.kv_dtype
    offload, moved = decoder.offload, None
    if offload is not None:
        moved = Offloaded(
            offload.numbers,
            offload.home_bytes + offload.table_bytes,
            offload.buffer_bytes,
            offload.pass_bytes,
        )
    return ModelBytes(*kept, scores, parts, moved)
