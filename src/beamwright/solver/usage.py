"""What a solver uses at this moment, and has used so far: numbers that any thread may read.

They are read while the solver's thread works, so they may be of slightly different moments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from beamwright.kv import CacheCounts, HostedStore
from beamwright.models import TreeModel
from beamwright.protocols import Direction
from beamwright.solver.solver import Solver


@dataclass(frozen=True)
class KVUsage:
    """Of one model's KV. host_bytes, host_budget_bytes: None where there is one tier."""

    device_bytes: int
    device_budget_bytes: int
    host_bytes: int | None
    host_budget_bytes: int | None
    cache: CacheCounts
    stall_s: float

    def __add__(self, other: KVUsage) -> KVUsage:
        return KVUsage(
            self.device_bytes + other.device_bytes,
            self.device_budget_bytes + other.device_budget_bytes,
            _both(self.host_bytes, other.host_bytes),
            _both(self.host_budget_bytes, other.host_budget_bytes),
            self.cache + other.cache,
            self.stall_s + other.stall_s,
        )


@dataclass(frozen=True)
class Usage:
    """kv: of the "generator" and of the "verifier", as far as they keep some here. link_bytes: that
    crossed the link, None without one. iterations, row_tokens, slot_tokens, preempted: see
    `decode.BatchCounts`.
    """

    kv: dict[str, KVUsage]
    link_bytes: dict[Direction, int] | None
    iterations: int
    row_tokens: int
    slot_tokens: int
    preempted: int

    def __add__(self, other: Usage) -> Usage:
        """Of two engines of one kind."""
        moved = self.link_bytes
        if moved is not None and other.link_bytes is not None:
            moved = {each: moved[each] + other.link_bytes[each] for each in moved}
        return Usage(
            {name: kv + other.kv[name] for name, kv in self.kv.items()},
            moved,
            self.iterations + other.iterations,
            self.row_tokens + other.row_tokens,
            self.slot_tokens + other.slot_tokens,
            self.preempted + other.preempted,
        )

    def over(self) -> Usage:
        """What stays of an engine that is gone: its counts."""
        kv = {
            name: replace(
                each,
                device_bytes=0,
                device_budget_bytes=0,
                host_bytes=None if each.host_bytes is None else 0,
                host_budget_bytes=None if each.host_budget_bytes is None else 0,
            )
            for name, each in self.kv.items()
        }
        return replace(self, kv=kv)


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


class Counts(Protocol):
    """Whoever counts for itself: engines elsewhere, summed up."""

    def usage(self) -> Usage: ...


def token_stats_of(solver: Solver) -> frozenset[str]:
    """The statistics of every token that it keeps."""
    return solver._token_stats


def usage_of(solver: Solver | Counts) -> Usage:
    """By any thread."""
    if not isinstance(solver, Solver):
        return solver.usage()
    parts, counts = solver._machinery.parts, solver._machinery.batch.counts
    models = {"generator": parts.generator, "verifier": parts.scorer}
    return Usage(
        kv={name: _kv(model) for name, model in models.items() if model is not None},
        link_bytes=None
        if parts.tier is None
        else {each: parts.tier.link.bytes_moved[each] for each in Direction},
        iterations=counts.iterations,
        row_tokens=counts.row_tokens,
        slot_tokens=counts.slot_tokens,
        preempted=counts.preempted,
    )


def _kv(model: TreeModel) -> KVUsage:
    store = model.store
    device, host = store.pool.budget, None
    if isinstance(store, HostedStore):
        device, host = store.device_budget, store.pool.budget
    elif store.host is not None:
        host = store.host.ledger.budget
    return KVUsage(
        device_bytes=device.used_bytes,
        device_budget_bytes=device.total_bytes,
        host_bytes=None if host is None else host.used_bytes,
        host_budget_bytes=None if host is None else host.total_bytes,
        cache=store.counts.cache,
        stall_s=store.stall_s,
    )
