"""FLOPs, bytes and seconds of a decode step with sparse attention, on one device or two.

Formulas of AsyncSpade: equations 6 to 11 (appendix B), Table 2 and the conditions of section 4.3.
The cache rank, which selects KV, is a second device or the host. The formulas treat MLA as MQA and
leave out top-k, small gathers, and all kernel launches that the hardware profile does not state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from beamwright.models.shape import ModelShape
from beamwright.plan.costs import Roofline
from beamwright.plan.sparse import loaded_tokens, selected_share


@dataclass(frozen=True)
class SparseLoad:
    """The rows of one decode step and the lengths of their paths.

    context: tokens of each path. selected: tokens that each row reads per layer, including sinks
    and recent tokens. page: tokens that share a pair of bounds. shared: distinct tokens of all
    paths divided by the sum of their lengths.
    """

    rows: int
    context: int
    selected: int
    page: int = 16
    shared: float = 1.0

    @property
    def seen(self) -> int:
        """Return the summed lengths of the paths."""
        return self.rows * self.context

    @property
    def union(self) -> float:
        """Return the number of distinct tokens of all paths."""
        return self.shared * self.seen

    @property
    def chosen(self) -> int:
        """Return the tokens that all rows select in one layer."""
        return self.rows * min(self.selected, self.context)

    @property
    def parts(self) -> list[tuple[float, float]]:
        """Return (tokens, rows sharing them), as if all paths had one common prefix and no more."""
        own = self.union if self.rows == 1 else (self.union - self.context) / (self.rows - 1)
        common = 0.0 if self.rows == 1 else self.context - own
        return [(common, self.rows), (self.rows * own, 1)]

    def loaded_tokens(self, anew: float) -> float:
        """Return the tokens that cross the link per decoded token of each row.

        Rows that select the same token load it once. anew: share of a selection that the last
        token's selection did not hold.
        """
        share = selected_share(self.selected, self.context)
        return loaded_tokens(self.parts, share, anew)


@dataclass(frozen=True)
class RankSeconds:
    """Seconds that one token of all rows takes on each resource, for all layers or one pack.

    inference_s: the forward pass. cache_s: selecting and gathering on the cache rank. up_s: sending
    queries, new keys and values to it. down_s: sending the selected K and V back.
    """

    inference_s: float
    cache_s: float
    up_s: float
    down_s: float

    @property
    def slack_s(self) -> float:
        """Return the forward pass's time minus that of the cache rank or the link, the longer one.

        Section 4.3 requires that neither takes longer than the forward pass.
        """
        return self.inference_s - max(self.cache_s, self.up_s + self.down_s)

    @property
    def hidden(self) -> bool:
        return self.slack_s >= 0


class SparseMethod(StrEnum):
    """How the tokens to attend to are selected.

    EXACT scores all keys with the true query; the paper calls it TOVA (Eq. 8). QUEST scores the
    bounds of pages. AHEAD does so with a query computed from the layer before, which costs a second
    query projection.
    """

    FULL = "full"
    EXACT = "exact"
    QUEST = "quest"
    ASYNCSPADE = "asyncspade"
    AHEAD = "ahead"


def parameter_flops(shape: ModelShape) -> int:
    """Return Eq. 6: FLOPs per token of projections and feed-forward layers, without the LM head."""
    attention = 4 * shape.hidden * shape.heads * shape.head_dim
    keys_values = 4 * shape.kv_heads * shape.head_dim * shape.hidden
    return shape.layers * (attention + keys_values + 6 * shape.hidden * shape.intermediate)


def attention_flops(
    shape: ModelShape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Return Eq. 7 to 10: FLOPs of attention for one token on the inference rank.

    They include the selection if that rank selects.
    """
    query = shape.layers * shape.heads * shape.head_dim
    return round(4 * query * _attended(shape, method, SparseLoad(1, context, selected, page)))


def token_flops(
    shape: ModelShape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Return Eq. 11: all FLOPs of one token on the inference rank."""
    return parameter_flops(shape) + attention_flops(shape, method, context, selected, page)


def cache_rank_flops(shape: ModelShape, context: int) -> int:
    """Return the FLOPs of scoring all keys on the cache rank, which Eq. 10 leaves out."""
    return 2 * shape.layers * shape.heads * shape.head_dim * context


def decode_seconds(
    roofline: Roofline, shape: ModelShape, method: SparseMethod, load: SparseLoad
) -> float:
    """Seconds of one token for all rows, on one device that holds what the method reads.

    ASYNCSPADE: of the inference rank alone. Data-parallel: half of the rows on each device.
    """
    read, attended = _read(shape, method, load), _attended(shape, method, load)
    return roofline.decode_step_s(load.rows, read, attended)


def _attended(shape: ModelShape, method: SparseMethod, load: SparseLoad) -> float:
    """Tokens that all rows attend to; a key that is only scored is half of one."""
    if method is SparseMethod.FULL:
        return load.seen
    attended = load.rows * min(load.selected, load.context)
    if method is SparseMethod.EXACT:
        return attended + load.seen / 2
    if method in (SparseMethod.QUEST, SparseMethod.AHEAD):
        query = load.rows * shape.hidden / 2 if method is SparseMethod.AHEAD else 0.0
        return attended + query + load.seen / load.page / 2
    return attended


def _read(shape: ModelShape, method: SparseMethod, load: SparseLoad) -> float:
    """Return the tokens whose K and V are read; a page's two bounds are as large as one token."""
    if method is SparseMethod.FULL:
        return load.union
    if method is SparseMethod.EXACT:
        return load.chosen + load.union / 2
    if method in (SparseMethod.QUEST, SparseMethod.AHEAD):
        ahead = method is SparseMethod.AHEAD
        weights = shape.hidden * shape.heads / (2 * shape.kv_heads) if ahead else 0.0
        return load.chosen + weights + load.union / load.page
    return load.chosen


def two_devices(
    roofline: Roofline, shape: ModelShape, load: SparseLoad, link_bandwidth: float
) -> RankSeconds:
    """Return AsyncSpade's times on two equal devices. link_bandwidth: bytes/s in each direction.

    The cache rank reads every key, then reads and writes the selected K and V.
    """
    model, hardware = roofline.model, roofline.hardware
    cache_bytes = model.kv_bytes_per_token * (load.union / 2 + 2 * load.chosen)
    flops = load.rows * cache_rank_flops(shape, load.context)
    query_bytes = model.num_layers * model.num_heads * model.head_dim * model.element_bytes
    return RankSeconds(
        inference_s=decode_seconds(roofline, shape, SparseMethod.ASYNCSPADE, load),
        cache_s=max(
            cache_bytes / (hardware.device_bandwidth * hardware.bandwidth_share),
            flops / (hardware.flops * hardware.flops_share),
        ),
        up_s=load.rows * (query_bytes + model.kv_bytes_per_token) / link_bandwidth,
        down_s=load.chosen * model.kv_bytes_per_token / link_bandwidth,
    )


def pack_bandwidth(
    shape: ModelShape, *, batch: int, selected: int, layers: int, seconds: float, heads: int
) -> float:
    """Return the least bytes per second with which a pack's selection arrives in time.

    heads: heads whose KV is sent. `shape.heads` reproduces Table 2, apart from its unit, MiB per
    millisecond. 2 * `shape.kv_heads` (K and V of each KV head) is what really has to move.
    """
    return batch * selected * heads * shape.head_dim * 2 * layers / seconds


@dataclass(frozen=True)
class Host:
    """A host that serves as the cache rank. The defaults are assumptions about a desktop.

    bandwidth: bytes/s at which it scores keys. flops: FLOP/s. anew: share of a selection that the
    last token's selection did not hold (see `plan.sparse`); ShadowKV reports 40 % for large models.
    """

    bandwidth: float = 40e9
    flops: float = 1e12
    anew: float = 0.4


def host_ranks(
    roofline: Roofline, shape: ModelShape, load: SparseLoad, host: Host, *, bounds: bool
) -> RankSeconds:
    """Return the times when the device decodes and the host keeps and selects the KV.

    bounds: the host scores bounds of pages instead of all keys.
    """
    model, hardware = roofline.model, roofline.hardware
    page = load.page if bounds else 1
    scored_bytes = model.kv_bytes_per_token * load.union / (page if bounds else 2)
    flops = load.rows * cache_rank_flops(shape, load.context) / page
    query_bytes = model.num_layers * model.num_heads * model.head_dim * model.element_bytes
    missed_bytes = model.kv_bytes_per_token * load.loaded_tokens(host.anew)
    return RankSeconds(
        inference_s=roofline.decode_step_s(load.rows, load.chosen, load.chosen),
        cache_s=max(scored_bytes / host.bandwidth, flops / host.flops),
        up_s=load.rows * query_bytes / (hardware.d2h_bandwidth * hardware.link_share),
        down_s=missed_bytes / (hardware.h2d_bandwidth * hardware.link_share),
    )
