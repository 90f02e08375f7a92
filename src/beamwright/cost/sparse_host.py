"""Sparse decoding with KV at home on the host, against full attention in groups that are swapped.

Steady state at one context, everything overlapped ideally: what locality, prefetching into room
that it has, and a selection that is one token old come near to. `simulator` has the waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from beamwright.cost.roofline import Roofline
from beamwright.cost.sparse import (
    AttentionShape,
    RankSeconds,
    SparseLoad,
    SparseMethod,
    cache_rank_flops,
    decode_seconds,
)

LEAST_GAIN = 1.25
"""What sparse decoding has to save before it is worth its error, and the top-k and gathers that
the roofline leaves out."""


class Scored(StrEnum):
    """What the tokens are chosen by, and where it is."""

    HOST_KEYS = "host keys"
    HOST_BOUNDS = "host bounds"
    DEVICE_BOUNDS = "device bounds"
    ALL_ON_DEVICE = "all on the device"


@dataclass(frozen=True)
class Host:
    """A host as the cache rank; figures of a desktop, assumed.

    bandwidth: bytes/s at which it scores; flops: FLOP/s. missed: share of what is selected that
    the device has not kept from the token before (ShadowKV saves 60 % of the transfers).
    """

    bandwidth: float = 40e9
    flops: float = 1e12
    missed: float = 0.4


def host_ranks(
    roofline: Roofline,
    shape: AttentionShape,
    load: SparseLoad,
    scored: Scored,
    host: Host,
) -> RankSeconds:
    """Seconds of one token of all rows: the device decodes, the host keeps KV, and may choose."""
    model, hardware = roofline.model, roofline.hardware
    on_host = scored in (Scored.HOST_KEYS, Scored.HOST_BOUNDS)
    score_s = 0.0
    if on_host:
        keys = scored is Scored.HOST_KEYS
        scored_bytes = model.kv_bytes_per_token * load.union / (2 if keys else load.page)
        flops = load.rows * cache_rank_flops(shape, load.context) / (1 if keys else load.page)
        score_s = max(scored_bytes / host.bandwidth, flops / host.flops)
    query_bytes = model.num_layers * model.num_heads * model.head_dim * model.element_bytes
    method = SparseMethod.ASYNCSPADE if on_host else SparseMethod.QUEST
    missed = 0.0 if scored is Scored.ALL_ON_DEVICE else host.missed
    missed_bytes = model.kv_bytes_per_token * load.chosen * missed
    return RankSeconds(
        inference_s=decode_seconds(roofline, shape, method, load),
        cache_s=score_s,
        up_s=on_host * load.rows * query_bytes / (hardware.d2h_bandwidth * hardware.link_share),
        down_s=missed_bytes / (hardware.h2d_bandwidth * hardware.link_share),
    )


def device_bytes(kv_bytes_per_token: int, load: SparseLoad, scored: Scored) -> float:
    """KV that the device has to hold: what is selected, and what it is chosen by."""
    bounds = load.union / load.page
    tokens = {
        Scored.DEVICE_BOUNDS: load.chosen + bounds,
        Scored.ALL_ON_DEVICE: load.union + bounds,
    }.get(scored, load.chosen)
    return kv_bytes_per_token * tokens


def full_seconds(
    roofline: Roofline, load: SparseLoad, kv_budget_bytes: float, step_tokens: int
) -> tuple[float, int]:
    """Seconds per token of all rows with full attention, and groups of a step of `step_tokens`.

    In one group where all KV fits; else by locality, as few even groups as fit, each loaded once a
    step; where not even one path fits, 0 groups: by layers, everything else for every token.
    """
    link = roofline.hardware.h2d_bandwidth * roofline.hardware.link_share
    kv_bytes = roofline.model.kv_bytes_per_token
    outside_bytes = max(0.0, kv_bytes * load.union - kv_budget_bytes)
    if kv_bytes * load.context > kv_budget_bytes:
        together_s = roofline.decode_step(load.rows, load.union, load.seen)
        return max(together_s, outside_bytes / link), 0
    groups = min(load.rows, math.ceil(kv_bytes * load.union / kv_budget_bytes))
    rows = -(-load.rows // groups)
    group_s = roofline.decode_step(rows, load.union / groups, load.seen / groups)
    return max(groups * group_s, outside_bytes / link / step_tokens), groups


@dataclass(frozen=True)
class SparseVerdict:
    """Seconds per token of all rows, in full attention and sparsely.

    groups: of full attention, see `full_seconds`. scored: the fastest way to choose that fits;
    None where nothing does, or where rows would select all that they see.
    """

    full_s: float
    groups: int
    sparse_s: float
    scored: Scored | None

    @property
    def gain(self) -> float:
        """How many times as fast sparse decoding is."""
        return self.full_s / self.sparse_s

    @property
    def worthwhile(self) -> bool:
        """What `auto` goes by."""
        return self.scored is not None and self.gain >= LEAST_GAIN


def compare_sparse(
    roofline: Roofline,
    shape: AttentionShape,
    load: SparseLoad,
    kv_budget_bytes: float,
    *,
    step_tokens: int = 32,
    host: Host | None = None,
) -> SparseVerdict:
    """Whether sparse decoding is cheaper than full attention for these rows.

    kv_budget_bytes: of device memory, for KV. step_tokens: between two swaps of groups.
    """
    full_s, groups = full_seconds(roofline, load, kv_budget_bytes, step_tokens)
    seconds: dict[Scored, float] = {}
    for scored in Scored if load.selected < load.context else ():
        if device_bytes(roofline.model.kv_bytes_per_token, load, scored) <= kv_budget_bytes:
            seconds[scored] = host_ranks(roofline, shape, load, scored, host or Host()).ideal_s
    best = min(seconds, key=lambda scored: seconds[scored], default=None)
    return SparseVerdict(full_s, groups, full_s if best is None else seconds[best], best)
