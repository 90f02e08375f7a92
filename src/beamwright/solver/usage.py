"""What a solver uses at this moment, and has used so far: numbers that any thread may read.

They are read while the solver's thread works, so they may be of slightly different moments.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def usage_of(solver: Solver) -> Usage:
    """By any thread."""
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
