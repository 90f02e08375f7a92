"""What a decode step takes under sparse decoding: FLOPs, bytes and seconds, on one device or two.

AsyncSpade, appendix B, equations 6 to 11, Table 2 and the conditions of section 4.3, with a second
device or the host as the cache rank. Formulas only: MLA counts as MQA in them; top-k, gathers of
small pieces and kernels' launches are left out, but for those that a hardware profile states.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from beamwright.models.shape import ModelShape
from beamwright.plan.costs import Roofline
from beamwright.plan.sparse import loaded_tokens, selected_share


@dataclass(frozen=True)
class SparseLoad:
    """The rows of one decode step, and the tokens behind them.

    context: of each path. selected: by each row and layer, sinks and recents inside. page: tokens
    that share a pair of bounds. shared: distinct tokens of all paths over their sum.
    """

    rows: int
    context: int
    selected: int
    page: int = 16
    shared: float = 1.0

    @property
    def seen(self) -> int:
        """Summed lengths of the paths."""
        return self.rows * self.context

    @property
    def union(self) -> float:
        """Distinct tokens of all paths."""
        return self.shared * self.seen

    @property
    def chosen(self) -> int:
        """Tokens that rows select, of a layer."""
        return self.rows * min(self.selected, self.context)

    @property
    def parts(self) -> list[tuple[float, float]]:
        """As if all paths had one beginning in common, and nothing else."""
        own = self.union if self.rows == 1 else (self.union - self.context) / (self.rows - 1)
        common = 0.0 if self.rows == 1 else self.context - own
        return [(common, self.rows), (self.rows * own, 1)]

    def loaded_tokens(self, anew: float) -> float:
        """Tokens that cross a link for one of each row: once for all, and not from token to
        token."""
        share = selected_share(self.selected, self.context)
        return loaded_tokens(self.parts, share, anew)


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


class SparseMethod(StrEnum):
    """What chooses the tokens.

    EXACT is the paper's "TOVA", whose Eq. 8 scores all keys with the true query. AHEAD scores page
    bounds, as QUEST does, with a query that is computed from the residual of a layer before: a
    second query projection.
    """

    FULL = "full"
    EXACT = "exact"
    QUEST = "quest"
    ASYNCSPADE = "asyncspade"
    AHEAD = "ahead"


def parameter_flops(shape: ModelShape) -> int:
    """Eq. 6: projections and feed-forward of one token; embeddings and LM head are left out."""
    attention = 4 * shape.hidden * shape.heads * shape.head_dim
    keys_values = 4 * shape.kv_heads * shape.head_dim * shape.hidden
    return shape.layers * (attention + keys_values + 6 * shape.hidden * shape.intermediate)


def attention_flops(
    shape: ModelShape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Eq. 7 to 10: attention of one token on the inference rank, selection included where it is
    done there."""
    query = shape.layers * shape.heads * shape.head_dim
    return round(4 * query * _attended(shape, method, SparseLoad(1, context, selected, page)))


def token_flops(
    shape: ModelShape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Eq. 11."""
    return parameter_flops(shape) + attention_flops(shape, method, context, selected, page)


def cache_rank_flops(shape: ModelShape, context: int) -> int:
    """What Eq. 10 leaves out: the cache rank scores every key; with it the sum is Eq. 8's."""
    return 2 * shape.layers * shape.heads * shape.head_dim * context


def decode_seconds(
    roofline: Roofline, shape: ModelShape, method: SparseMethod, load: SparseLoad
) -> float:
    """Seconds of one token for all rows, on one device that holds what the method reads.

    ASYNCSPADE: of the inference rank alone. Data-parallel: half of the rows on each device.
    """
    read, attended = _read(shape, method, load), _attended(shape, method, load)
    return roofline.decode_step(load.rows, read, attended)


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
    """Tokens whose K and V are read; a page's two bounds are as many bytes as a token."""
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
    """AsyncSpade on two devices of one kind. link_bandwidth: bytes/s between them, each way.

    The cache rank reads every key, then reads and writes what is selected.
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
    """Least bytes per second by which a pack of layers' selection is there before it is needed.

    heads: `shape.heads` gives Table 2's column (times 2**20 / 1e6: it divides MiB by milliseconds);
    2 * `shape.kv_heads`, K and V, is what has to move.
    """
    return batch * selected * heads * shape.head_dim * 2 * layers / seconds


@dataclass(frozen=True)
class Host:
    """A host as the cache rank; figures of a desktop, assumed.

    bandwidth: bytes/s at which it scores; flops: FLOP/s. anew: see `plan.sparse`;
    of what is selected a device has kept 60 % from the token before, says ShadowKV of large models.
    """

    bandwidth: float = 40e9
    flops: float = 1e12
    anew: float = 0.4


def host_ranks(
    roofline: Roofline, shape: ModelShape, load: SparseLoad, host: Host, *, bounds: bool
) -> RankSeconds:
    """The device decodes; the host keeps KV, and chooses by all keys or by bounds of pages."""
    model, hardware = roofline.model, roofline.hardware
    page = load.page if bounds else 1
    scored_bytes = model.kv_bytes_per_token * load.union / (page if bounds else 2)
    flops = load.rows * cache_rank_flops(shape, load.context) / page
    query_bytes = model.num_layers * model.num_heads * model.head_dim * model.element_bytes
    missed_bytes = model.kv_bytes_per_token * load.loaded_tokens(host.anew)
    return RankSeconds(
        inference_s=roofline.decode_step(load.rows, load.chosen, load.chosen),
        cache_s=max(scored_bytes / host.bandwidth, flops / host.flops),
        up_s=load.rows * query_bytes / (hardware.d2h_bandwidth * hardware.link_share),
        down_s=missed_bytes / (hardware.h2d_bandwidth * hardware.link_share),
    )
