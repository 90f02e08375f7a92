"""What is measured of trees that were in flight together: time, bytes, budgets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from beamwright.config import Settings
from beamwright.counters import Counters
from beamwright.engine.limits import num_generated
from beamwright.engine.moving import MovingSplit
from beamwright.engine.timeline import Accounting
from beamwright.engine.tree_run import TreeRun
from beamwright.engine.validation import policy_name
from beamwright.models import TreeModel
from beamwright.protocols import SchedulePolicy
from beamwright.remote.generator import RemoteGenerator
from beamwright.solver.assembly import Machinery
from beamwright.solver.solution import (
    BatchStats,
    CacheReport,
    CacheStats,
    MemoryStats,
    RemoteStats,
    SparseStats,
)
from beamwright.solver.split import memory_stats
from beamwright.sparse import SparseAttention


@dataclass(frozen=True)
class KVFacts:
    """Of the KV of generator and verifier, in bytes."""

    device_budget: int
    device_peak: int
    generator_budget: int
    per_token: int
    host_peak: int | None
    h2d: int
    d2h: int
    scratch_peak: int
    recomputed_tokens: int


@dataclass(frozen=True)
class RunFacts:
    """What is measured while a tree is in flight; bytes are of all that ran beside it.

    counted: by the engine, by earlier processes as well. kv: None where the generator's is
    elsewhere, and so remote: of it; attention: of its own. graphs_failed: why steps were not
    captured.
    """

    settings: Settings
    counted: Counters
    total_s: float
    total_generated: int
    kv: KVFacts | None
    memory: MemoryStats
    cache: CacheReport
    sparse: SparseStats | None
    exact: bool
    schedule: str
    attention: str | None
    batch: BatchStats
    remote: RemoteStats | None = None
    graphs_failed: str | None = None


@dataclass(frozen=True)
class Mark:
    """All counters when a tree was admitted; see `Machinery.counted`."""

    time_s: float
    counted: Mapping[str, Counters]


class Meter:
    """Measures what happens while a tree is in flight, as the difference of two counts."""

    def __init__(
        self,
        machinery: Machinery,
        schedule: SchedulePolicy,
        accounting: Accounting,
        moving: MovingSplit | None = None,
    ) -> None:
        self._machinery, self._schedule, self._accounting = machinery, schedule, accounting
        self.moving = moving
        self._begun = self.mark()

    def mark(self) -> Mark:
        """Where all counters are."""
        return Mark(time.perf_counter(), self._machinery.counted())

    def spent(self, since: Mark, before: Counters | None = None) -> Counters:
        """Phases and groups since then, and `before`."""
        return self._accounting.now() - since.counted["engine"] + (before or Counters())

    def facts(
        self, run: TreeRun, settings: Settings, since: Mark, before: Counters | None
    ) -> RunFacts:
        """What was measured since a tree was admitted. before: by earlier processes."""
        machinery, parts = self._machinery, self._machinery.parts
        phases = self.spent(since, before)
        new = {name: now - since.counted[name] for name, now in machinery.counted().items()}
        generator, engine = parts.generator, new["engine"]
        return RunFacts(
            settings=settings,
            counted=phases,
            total_s=time.perf_counter() - since.time_s + run.elapsed_s,
            total_generated=max(num_generated(run.tree), engine.row_tokens),
            kv=None if generator is None else self._kv(generator, engine),
            memory=memory_stats(settings.memory.split, parts.plan, self.moving)
            if generator is not None
            else MemoryStats(None, None, parts.plan.verifier_kv_bytes, 0, 0),
            cache=self._cache(new),
            sparse=SparseStats.of(generator.backend.rule.method, new["generator"])
            if generator is not None and isinstance(generator.backend, SparseAttention)
            else None,
            exact=machinery.exact
            and generator is not None
            and settings.schedule.speculation != "truncate"
            and not _is_inexact(generator, resumed=before is not None),
            schedule=policy_name(self._schedule),
            attention=None if generator is None else generator.backend.name,
            batch=BatchStats.of(settings.schedule.max_batch, engine),
            remote=self._remote(engine),
            graphs_failed=machinery.batch.graphs_failed,
        )

    def _kv(self, generator: TreeModel, engine: Counters) -> KVFacts:
        parts, counted, moved = self._machinery.parts, self._machinery.counted(), self.moving
        models = parts.tree_models
        return KVFacts(
            device_budget=parts.plan.kv_bytes,
            device_peak=parts.device_peak_bytes,
            generator_budget=parts.plan.generator_kv_bytes
            if moved is None
            else moved.most_generator_bytes,
            per_token=generator.store.pool.layout.bytes_per_token,
            host_peak=None if parts.tier is None else sum(m.store.host_peak_bytes for m in models),
            h2d=engine.h2d_bytes,
            d2h=engine.d2h_bytes,
            scratch_peak=sum(model.store.scratch.peak_bytes for model in models),
            recomputed_tokens=sum(
                (counted[name] - self._begun.counted[name]).recomputed_tokens
                for name in parts.models
            ),
        )

    def _remote(self, engine: Counters) -> RemoteStats | None:
        loaded = self._machinery.parts.loaded
        if not isinstance(loaded, RemoteGenerator):
            return None
        return RemoteStats.of(loaded.token_ids, loaded.source.facts.searches, engine)

    def _cache(self, new: Mapping[str, Counters]) -> CacheReport:
        kept = {
            name: CacheStats.of(new[name])
            for name, model in self._machinery.parts.models.items()
            if not model.store.streams_layers
        }
        return CacheReport(kept.get("generator"), kept.get("verifier"))


def _is_inexact(model: TreeModel, *, resumed: bool) -> bool:
    """Sparse decoding of a path resumed with KV of full attention, or as timing has it."""
    sparse = isinstance(model.backend, SparseAttention) and model.backend.rule
    return bool(sparse and (resumed or sparse.late != "wait"))
