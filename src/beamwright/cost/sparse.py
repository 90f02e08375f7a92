"""FLOPs of a token under sparse decoding, and the bandwidth that a cache rank needs.

AsyncSpade, appendix B, equations 6 to 11, and Table 2. Formulas only: MLA counts as MQA in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIB = 2**20


class SparseMethod(StrEnum):
    """What chooses the tokens. EXACT is the paper's "TOVA", whose Eq. 8 scores all keys with the
    true query; TOVA itself evicts for good, and never sees what it has evicted again."""

    FULL = "full"
    EXACT = "exact"
    QUEST = "quest"
    ASYNCSPADE = "asyncspade"


@dataclass(frozen=True)
class AttentionShape:
    """l, H, q, kv, h and i of the equations."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


def parameter_flops(shape: AttentionShape) -> int:
    """Eq. 6: projections and feed-forward of one token; embeddings and LM head are left out."""
    attention = 4 * shape.hidden * shape.heads * shape.head_dim
    keys_values = 4 * shape.kv_heads * shape.head_dim * shape.hidden
    return shape.layers * (attention + keys_values + 6 * shape.hidden * shape.intermediate)


def attention_flops(
    shape: AttentionShape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Eq. 7 to 10: attention of one token on the inference rank, selection included where it is
    done there."""
    query = shape.layers * shape.heads * shape.head_dim
    attended = 4 * query * (context if method is SparseMethod.FULL else selected)
    scored = {SparseMethod.EXACT: context, SparseMethod.QUEST: context / page}.get(method, 0)
    return attended + round(2 * query * scored)


def cache_rank_flops(shape: AttentionShape, context: int) -> int:
    """What Eq. 10 leaves out: the cache rank scores every key; with it the sum is Eq. 8's."""
    return 2 * shape.layers * shape.heads * shape.head_dim * context


def token_flops(
    shape: AttentionShape, method: SparseMethod, context: int, selected: int, page: int = 16
) -> int:
    """Eq. 11."""
    return parameter_flops(shape) + attention_flops(shape, method, context, selected, page)


def pack_bandwidth(
    shape: AttentionShape, *, batch: int, selected: int, layers: int, seconds: float, heads: int
) -> float:
    """Least bytes per second by which a pack of layers' selection is there before it is needed.

    heads: `shape.heads` gives Table 2's column (times 2**20 / 1e6: it divides MiB by milliseconds);
    2 * `shape.kv_heads`, K and V, is what has to move.
    """
    return batch * selected * heads * shape.head_dim * 2 * layers / seconds
