"""Sparse decoding with KV at home on the host, against full attention in groups that are swapped.

Steady state at one context, everything overlapped ideally: what locality, prefetching into room
that it has, and a selection that is one token old come near to. `simulator` has the waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from beamwright.plan.roofline import Roofline
from beamwright.plan.sparse import (
    AttentionShape,
    RankSeconds,
    SparseLoad,
    SparseMethod,
    cache_rank_flops,
    decode_seconds,
)


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
    scored: Scored | None,
    host: Host,
) -> RankSeconds:
    """Seconds of one token of all rows: the device decodes, the host keeps KV, and may choose.

    scored: None where nothing is scored that is not attended to anyway.
    """
    model, hardware = roofline.model, roofline.hardware
    on_host = scored in (Scored.HOST_KEYS, Scored.HOST_BOUNDS)
    score_s = 0.0
    if on_host:
        keys = scored is Scored.HOST_KEYS
        scored_bytes = model.kv_bytes_per_token * load.union / (2 if keys else load.page)
        flops = load.rows * cache_rank_flops(shape, load.context) / (1 if keys else load.page)
        score_s = max(scored_bytes / host.bandwidth, flops / host.flops)
    query_bytes = model.num_layers * model.num_heads * model.head_dim * model.element_bytes
    on_device = scored in (Scored.DEVICE_BOUNDS, Scored.ALL_ON_DEVICE)
    method = SparseMethod.QUEST if on_device else SparseMethod.ASYNCSPADE
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
