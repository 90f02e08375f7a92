"""What is measured of trees that were in flight together: time, bytes, budgets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from beamwright.config import Settings
from beamwright.engine.accounting import Accounting
from beamwright.engine.batching import BatchCounts
from beamwright.engine.limits import num_generated
from beamwright.engine.moving import MovingSplit
from beamwright.engine.obeyed import policy_name
from beamwright.engine.tree_run import TreeRun
from beamwright.kv import CacheCounts, CacheStats, SparseCounts
from beamwright.models import TreeModel
from beamwright.protocols import SchedulePolicy
from beamwright.remote.generator import RemoteGenerator
from beamwright.remote.writer import RemoteCounts, RemoteSteps
from beamwright.solver.assembly import Machinery
from beamwright.solver.solution import (
    BatchStats,
    CacheReport,
    MemoryStats,
    RankStats,
    RemoteStats,
    ScoreStats,
    SparseStats,
)
from beamwright.solver.split import memory_stats
from beamwright.solver.tiers import Traffic
from beamwright.sparse import SparseAttention
from beamwright.verify import PrmVerifier


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

    kv: None where the generator's is elsewhere, and so remote: of it; attention: of its own.
    graphs_failed: why steps were not captured.
    """

    settings: Settings
    accounting: Accounting
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
    rows_ahead: int = 0
    remote: RemoteStats | None = None
    graphs_failed: str | None = None


@dataclass(frozen=True)
class Mark:
    """All counters when a tree was admitted. tokens: drawn for all trees; batch: what it did;
    cache: of each model that keeps KV; calls, scored: of the verifier."""

    time_s: float
    traffic: Traffic
    seconds: Mapping[str, float]
    num_groups: int
    tokens: int
    batch: BatchCounts
    cache: Sequence[CacheCounts]
    sparse: SparseCounts
    calls: int
    scored: int
    remote: RemoteCounts


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
        self._moving = moving

    def mark(self) -> Mark:
        """Where all counters are."""
        accounting, counts = self._accounting, self._machinery.batch.counts
        return Mark(
            time.perf_counter(),
            self._traffic(),
            dict(accounting.seconds),
            accounting.num_groups,
            counts.row_tokens,
            replace(counts),
            [replace(each.store.counts.cache) for each in self._machinery.parts.tree_models],
            self._sparse_counts(),
            accounting.calls,
            accounting.scored,
            self._remote_counts(),
        )

    def spent(self, since: Mark, before: Accounting | None = None) -> Accounting:
        """Phases and groups since then, and `before`."""
        found = self._accounting.since(since.seconds, since.num_groups)
        if before is not None:
            for name, seconds in before.seconds.items():
                found.seconds[name] += seconds
            found.num_groups += before.num_groups
        return found

    def facts(
        self, run: TreeRun, settings: Settings, since: Mark, before: Accounting | None
    ) -> RunFacts:
        """What was measured since a tree was admitted. before: by earlier processes."""
        machinery, parts = self._machinery, self._machinery.parts
        generator, drawn = parts.generator, machinery.batch.counts.row_tokens - since.tokens
        return RunFacts(
            settings=settings,
            accounting=self.spent(since, before),
            total_s=time.perf_counter() - since.time_s + run.elapsed_s,
            total_generated=max(num_generated(run.tree), drawn),
            kv=None if generator is None else self._kv(generator, since),
            memory=memory_stats(settings.memory.split, parts.plan, self._moving)
            if generator is not None
            else MemoryStats(None, None, parts.plan.verifier_kv_bytes, 0, 0),
            cache=self._cache(since, self._scores(run)),
            sparse=None if generator is None else _sparse(generator, since.sparse),
            exact=machinery.exact
            and generator is not None
            and settings.schedule.speculation != "truncate"
            and not _is_inexact(generator, resumed=before is not None),
            schedule=policy_name(self._schedule),
            attention=None if generator is None else generator.backend.name,
            batch=self._batch(settings.schedule.max_batch, since),
            rows_ahead=machinery.batch.counts.speculative - since.batch.speculative,
            remote=self._remote(since),
            graphs_failed=machinery.batch.counts.graphs_failed,
        )

    def _kv(self, generator: TreeModel, since: Mark) -> KVFacts:
        parts, after = self._machinery.parts, self._traffic()
        models, moved = parts.tree_models, self._moving
        return KVFacts(
            device_budget=parts.plan.kv_bytes,
            device_peak=parts.device_peak_bytes,
            generator_budget=parts.plan.generator_kv_bytes
            if moved is None
            else moved.counts.most_generator_bytes,
            per_token=generator.store.pool.layout.bytes_per_token,
            host_peak=None if parts.tier is None else sum(m.store.host_peak_bytes for m in models),
            h2d=after.h2d_bytes - since.traffic.h2d_bytes,
            d2h=after.d2h_bytes - since.traffic.d2h_bytes,
            scratch_peak=sum(model.store.scratch.peak_bytes for model in models),
            recomputed_tokens=sum(model.store.counts.recomputed_tokens for model in models),
        )

    def _sparse_counts(self) -> SparseCounts:
        generator = self._machinery.parts.generator
        return SparseCounts() if generator is None else replace(generator.store.counts.sparse)

    def _remote_counts(self) -> RemoteCounts:
        writer = self._machinery.batch
        return replace(writer.remote) if isinstance(writer, RemoteSteps) else RemoteCounts()

    def _remote(self, since: Mark) -> RemoteStats | None:
        loaded = self._machinery.parts.loaded
        if not isinstance(loaded, RemoteGenerator):
            return None
        found = self._remote_counts().since(since.remote)
        return RemoteStats(
            loaded.token_ids,
            found.requests,
            found.retries,
            found.prompt_tokens,
            found.cached_tokens,
            loaded.source.facts.searches,
        )

    def _cache(self, since: Mark, scores: ScoreStats | None) -> CacheReport:
        parts = self._machinery.parts
        found = {
            model: None
            if model.store.streams_layers
            else CacheStats.between(model.store.counts.cache, then)
            for model, then in zip(parts.tree_models, since.cache, strict=True)
        }
        generator, scorer = parts.generator, parts.scorer
        return CacheReport(
            None if generator is None else found[generator],
            None if scorer is None else found[scorer],
            scores,
        )

    def _scores(self, run: TreeRun) -> ScoreStats | None:
        verifier = self._machinery.parts.verifier
        if not isinstance(verifier, PrmVerifier) or verifier.scores is None:
            return None
        usages = [dict(node.usage) for node in run.tree.nodes()]  # a lane may be writing to them
        found, computed = (
            sum(usage.get(name, 0) for usage in usages)
            for name in ("scores_found", "scores_computed")
        )
        return ScoreStats(found, computed, len(verifier.scores))

    def _traffic(self) -> Traffic:
        return Traffic.now(self._machinery.parts.tier)

    def _batch(self, slots: int | None, since: Mark) -> BatchStats:
        now, then = self._machinery.batch.counts, since.batch
        tokens, steps = now.row_tokens - then.row_tokens, now.steps - then.steps
        computed = now.slot_tokens - then.slot_tokens
        calls = self._accounting.calls - since.calls
        return BatchStats(
            slots=slots,
            iterations=now.iterations - then.iterations,
            rows_mean=tokens / steps if steps else None,
            occupancy=tokens / computed if computed else None,
            admitted=now.admitted - then.admitted,
            preempted=now.preempted - then.preempted,
            verifier_calls=calls,
            verifier_steps_mean=(self._accounting.scored - since.scored) / calls if calls else None,
        )


def _is_inexact(model: TreeModel, *, resumed: bool) -> bool:
    """Sparse decoding of a path resumed with KV of full attention, or as timing has it."""
    sparse = isinstance(model.backend, SparseAttention) and model.backend.rule
    return bool(sparse and (resumed or sparse.late != "wait"))


def _sparse(model: TreeModel, since: SparseCounts) -> SparseStats | None:
    if not isinstance(model.backend, SparseAttention):
        return None
    now = model.store.counts.sparse
    tokens, heads = now.tokens - since.tokens, now.num_heads - since.num_heads
    return SparseStats(
        method=model.backend.rule.method,
        tokens=tokens,
        visible_mean=(now.visible_tokens - since.visible_tokens) / tokens if tokens else None,
        selected_mean=(now.selected_tokens - since.selected_tokens) / tokens if tokens else None,
        left_out_mean=(now.left_out - since.left_out) / heads if heads else None,
        corrections=now.corrections - since.corrections,
        rank=_rank(now, since) if now.takes > since.takes else None,
    )


def _rank(now: SparseCounts, since: SparseCounts) -> RankStats:
    link_s = now.link_s - since.link_s
    return RankStats(
        takes=now.takes - since.takes,
        late=now.late - since.late,
        reused=now.reused - since.reused,
        waited_s=now.waited_s - since.waited_s,
        forward_s=now.forward_s - since.forward_s,
        link_s=link_s,
        choose_s=max(0.0, now.rank_s - since.rank_s - link_s),
    )
