"""The machinery of a solver: what all its problems share, what it counts, and who writes steps.

Knows what is loaded (`assembly`) and no problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from beamwright.config import Settings
from beamwright.counters import Counters, Level, Usage
from beamwright.engine.executor import Threads
from beamwright.engine.moving import MovingSplit
from beamwright.engine.row import Decoding
from beamwright.engine.speculation import Payoff
from beamwright.engine.tensor_rows import make_running_batch
from beamwright.engine.timeline import Timeline
from beamwright.errors import InputError
from beamwright.kv.pool import ByteBudget
from beamwright.models.load import LoadedModel
from beamwright.models.tree_model import TreeModel
from beamwright.progress import Progress
from beamwright.protocols import Direction, SchedulePolicy, StepWriter, Verifier
from beamwright.remote.generator import RemoteGenerator
from beamwright.remote.writer import RemoteSteps
from beamwright.solver.memory import MemoryPlan
from beamwright.solver.tiers import HostShares
from beamwright.sparse.rule import SparseRule
from beamwright.tree import Node


class Writer(StepWriter, Protocol):
    """Writes the steps of all trees: the running batch, or a remote generator's.

    graphs_failed: why steps are not captured after all.
    """

    counts: Counters
    graphs_failed: str | None

    def decode_as(self, root: Node, decoding: Decoding) -> None: ...
    def abort(self) -> None: ...


@dataclass
class Machinery:
    """What all problems of a solver share, loaded or allocated once.

    settings: with nothing left open; from here on nobody reads what was given. reader: what reads
    prompts. generator: the model with its KV, None where it is remote. verifier, and scorer: its
    model, None where it has none. tier: None where all KV is on the device. shared: the memory of
    both models, where it can move between them; moving: what moves it. rule: of sparse decoding.
    remote: the generator where it is not here.

    exact: results of what runs here do not depend on the batch. token_stats: that are kept of every
    token. payoff: what problems have taught of speculation.
    """

    settings: Settings
    reader: LoadedModel | RemoteGenerator
    plan: MemoryPlan
    tier: HostShares | None
    schedule: SchedulePolicy
    verifier: Verifier
    timeline: Timeline
    progress: Progress
    generator: TreeModel | None = None
    scorer: TreeModel | None = None
    shared: ByteBudget | None = None
    moving: MovingSplit | None = None
    rule: SparseRule | None = None
    remote: RemoteGenerator | None = None
    batch: Writer = field(init=False)
    threads: Threads = field(init=False)
    exact: bool = field(init=False)
    token_stats: frozenset[str] = field(init=False)
    payoff: Payoff = field(default_factory=Payoff)

    @property
    def models(self) -> dict[str, TreeModel]:
        """Every model that keeps KV here, by what it does, the generator first."""
        models = {"generator": self.generator, "verifier": self.scorer}
        return {name: model for name, model in models.items() if model is not None}

    @property
    def tree_models(self) -> list[TreeModel]:
        """The same, in this order."""
        return [*self.models.values()]

    @property
    def dtype(self) -> str:
        """The generator's; where it is remote, nobody here knows."""
        if self.generator is None:
            return "elsewhere"
        return str(self.generator.decoder.dtype).removeprefix("torch.")

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
        kept = {name: model.store.counts.copy() for name, model in self.models.items()}
        return {"engine": engine, **kept}

    def usage(self) -> Usage:
        """What is held, and has been counted, by any thread."""
        levels, counters = {}, self.counted()
        for name, model in self.models.items():
            counters[name].transfer_wait_s = model.store.stall_s
            for tier, budget in model.store.tiers.items():
                levels[name, tier] = Level(budget.used_bytes, budget.total_bytes)
        return Usage(levels, counters)

    def stop_threads(self) -> None:
        """Stop the link's threads, and a remote generator's; they start again when needed."""
        if self.tier is not None:
            self.tier.close()
        if self.remote is not None:
            self.remote.source.close()


_NOT_REMOTE = {
    "model": ("weights",),
    "sampling": ("top_logprobs",),
    "memory": ("split",),
    "schedule": (
        "schedule", "planner", "inter_beam", "balance", "prefetch", "reuse", "evict", "victims",
        "link_bandwidth", "batching", "speculation", "verify_ahead", "write_back", "graphs",
    ),
    "sparse": ("sparse",),
}  # fmt: skip
"""Options that are of the generator's KV, or of what it computes."""


def make_writer(made: Machinery) -> Writer:
    """The running batch, or what has a remote generator write.

    Raises:
        InputError: for what a remote generator does not say, or has no say in.
    """
    settings, stats, remote = made.settings, made.token_stats, made.remote
    if remote is None:
        assert made.generator is not None
        return make_running_batch(
            made.generator,
            made.reader.codec,
            settings,
            token_stats=stats,
            progress=made.progress,
        )
    named = f"--model {settings.model.model}"
    if stats:
        raise InputError(
            f"{named}: does not say {', '.join(sorted(stats))} of its tokens, which this search "
            "or verifier reads"
        )
    for section, names in _NOT_REMOTE.items():
        given, default = getattr(settings, section), type(getattr(settings, section))()
        for name in names:
            value = getattr(given, name)
            if name in given.model_fields_set and value != getattr(default, name):
                raise InputError(
                    f"--{name.replace('_', '-')} {value}: does nothing with {named}, whose KV is "
                    "not here"
                )
    decoding = Decoding(settings.sampling, settings.step, settings.search.seed)
    most = settings.schedule.max_batch
    return RemoteSteps(remote.source, remote.codec, remote.context, decoding, most, made.progress)
