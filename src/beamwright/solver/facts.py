"""What is measured of trees that were in flight together: time, bytes, budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.config import Settings
from beamwright.models import TreeModel
from beamwright.runtime.accounting import Accounting


@dataclass(frozen=True)
class Mark:
    """All counters when a tree was admitted.

    tokens: that had been drawn for all trees.
    """

    time_s: float
    h2d_bytes: int
    d2h_bytes: int
    seconds: Mapping[str, float]
    num_groups: int
    tokens: int


@dataclass(frozen=True)
class RunFacts:
    """What is common to the trees that were in flight together."""

    settings: Settings
    accounting: Accounting
    total_s: float
    total_generated: int
    device_budget_bytes: int
    device_peak_bytes: int
    generator_budget_bytes: int
    kv_bytes_per_token: int
    exact: bool
    schedule: str
    attention: str
    host_peak_bytes: int | None = None
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    scratch_peak_bytes: int = 0
    recomputed_tokens: int = 0

    @classmethod
    def of(
        cls,
        models: Sequence[TreeModel],
        *,
        has_host: bool,
        **common: Any,
    ) -> RunFacts:
        """What the models (the generator first) say of a run.

        has_host: is there a host tier? common: the other fields.
        """
        generator = models[0]
        return cls(
            device_peak_bytes=sum(model.store.device_peak_bytes for model in models),
            host_peak_bytes=sum(m.store.host_peak_bytes for m in models) if has_host else None,
            scratch_peak_bytes=sum(model.store.scratch.peak_bytes for model in models),
            recomputed_tokens=sum(model.store.counts.recomputed_tokens for model in models),
            kv_bytes_per_token=generator.store.pool.layout.bytes_per_token,
            attention=generator.backend.name,
            **common,
        )
