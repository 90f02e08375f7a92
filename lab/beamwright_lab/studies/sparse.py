"""What a decode step takes under sparse decoding: FLOPs, bytes and seconds, on one device or two.

AsyncSpade, appendix B, equations 6 to 11, Table 2 and the conditions of section 4.3; full attention
in groups that are swapped beside them. Formulas only: MLA counts as MQA in them; top-k, gathers of
small pieces and kernels' launches are left out, but for those that a hardware profile states.
"""

from __future__ import annotations

import math
from enum import StrEnum

from beamwright.plan.costs import Roofline, Shape
from beamwright.plan.sparse import RankSeconds, Scored, SparseLoad, cache_rank_flops


class SparseMethod(StrEnum):
    """What chooses the tokens.

    EXACT is the paper's "TOVA", whose Eq. 8 scores all keys with the true query; TOVA itself evicts
    for good, by the attention that it computes anyway. AHEAD scores page bounds, as QUEST does,
    with a query that is computed from the residual of a layer before: a second query projection.
    """

    FULL = "full"
    EXACT = "exact"
    QUEST = "quest"
    ASYNCSPADE = "asyncspade"
    TOVA = "tova"
    AHEAD = "ahead"


def parameter_flops(shape: Shape) -> int:
    """Eq. 6: projections and feed-forward of one token; embeddings and LM head are left out."""
    attention = 4 * shape.hidden * shape.heads * shape.head_dim
    keys_values = 4 * shape.kv_heads * shape.head_dim * shape.hidden
    return shape.layers * (attention + keys_values + 6 * shape.hidden * shape.intermediate)


def attention_flops(
    shape: Shape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Eq. 7 to 10: attention of one token on the inference rank, selection included where it is
    done there."""
    query = shape.layers * shape.heads * shape.head_dim
    return round(4 * query * _attended(shape, method, SparseLoad(1, context, selected, page)))


def token_flops(
    shape: Shape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Eq. 11."""
    return parameter_flops(shape) + attention_flops(shape, method, context, selected, page)


def decode_seconds(
    roofline: Roofline, shape: Shape, method: SparseMethod, load: SparseLoad
) -> float:
    """Seconds of one token for all rows, on one device that holds what the method reads.

    ASYNCSPADE: of the inference rank alone. Data-parallel: half of the rows on each device.
    """
    read, attended = _read(shape, method, load), _attended(shape, method, load)
    return roofline.decode_step(load.rows, read, attended)


def _attended(shape: Shape, method: SparseMethod, load: SparseLoad) -> float:
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


def _read(shape: Shape, method: SparseMethod, load: SparseLoad) -> float:
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
    roofline: Roofline, shape: Shape, load: SparseLoad, link_bandwidth: float
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
    shape: Shape, *, batch: int, selected: int, layers: int, seconds: float, heads: int
) -> float:
    """Least bytes per second by which a pack of layers' selection is there before it is needed.

    heads: `shape.heads` gives Table 2's column (times 2**20 / 1e6: it divides MiB by milliseconds);
    2 * `shape.kv_heads`, K and V, is what has to move.
    """
    return batch * selected * heads * shape.head_dim * 2 * layers / seconds


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
