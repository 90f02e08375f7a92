"""What a decode step takes under sparse decoding with KV on the host, ideally overlapped.

AsyncSpade, appendix B and the conditions of section 4.3, with the host as the cache rank. Top-k,
gathers of small pieces and kernels' launches are left out, but for those that a hardware profile
states.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from beamwright.plan.costs import Roofline, Shape


@dataclass(frozen=True)
class SparseLoad:
    """The rows of one decode step, and the tokens behind them.

    context: of each path. selected: by each row and layer, sinks and recents inside. page: tokens
    that share a pair of bounds. shared: distinct tokens of all paths over their sum;
    selected_shared: the same of what rows select.
    """

    rows: int
    context: int
    selected: int
    page: int = 16
    shared: float = 1.0
    selected_shared: float = 1.0

    @property
    def seen(self) -> int:
        """Summed lengths of the paths."""
        return self.rows * self.context

    @property
    def union(self) -> float:
        """Distinct tokens of all paths."""
        return self.shared * self.seen

    @property
    def chosen(self) -> float:
        """Distinct tokens that rows select, of a layer."""
        return self.selected_shared * self.rows * min(self.selected, self.context)


# --- FLOPs -----------------------------------------------------------------------------------


def cache_rank_flops(shape: Shape, context: int) -> int:
    """What Eq. 10 leaves out: the cache rank scores every key; with it the sum is Eq. 8's."""
    return 2 * shape.layers * shape.heads * shape.head_dim * context


# --- seconds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of one token of all rows, in all layers or in a pack of them, on separate resources.

    inference_s: the forward pass. cache_s: what chooses, and gathers. up_s: queries, new keys and
    values to the cache rank; down_s: selected K and V back.
    """

    inference_s: float
    cache_s: float
    up_s: float
    down_s: float

    @property
    def slack_s(self) -> float:
        """Of the tighter of section 4.3's conditions: a cycle of communication, and processing on
        the cache rank, should each take less than the forward pass."""
        return self.inference_s - max(self.cache_s, self.up_s + self.down_s)

    @property
    def hidden(self) -> bool:
        return self.slack_s >= 0

    @property
    def ideal_s(self) -> float:
        """Seconds per token if nothing ever waits for anything but its own resource."""
        return max(self.inference_s, self.cache_s, self.up_s, self.down_s)


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
    shape: Shape,
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
    read, attended = load.chosen, float(load.rows * min(load.selected, load.context))
    if scored in (Scored.DEVICE_BOUNDS, Scored.ALL_ON_DEVICE):  # two bounds are a token's bytes
        read += load.union / load.page
        attended += load.seen / load.page / 2
    missed = 0.0 if scored is Scored.ALL_ON_DEVICE else host.missed
    missed_bytes = model.kv_bytes_per_token * load.chosen * missed
    return RankSeconds(
        inference_s=roofline.decode_step(load.rows, read, attended),
        cache_s=score_s,
        up_s=on_host * load.rows * query_bytes / (hardware.d2h_bandwidth * hardware.link_share),
        down_s=missed_bytes / (hardware.h2d_bandwidth * hardware.link_share),
    )
