"""What residency did, and how often KV was where it was needed. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass
class CacheCounts:
    """How KV that was needed was found, of one model since its store was made.

    A row that joins the running batch needs all of its path; a prefill the path before it and its
    own tokens, the prefilled ones. What had left the device since it was needed last had to be
    loaded or recomputed, whether it was fetched ahead or waited for.

    evicted_blocks: left the device whole. loaded_blocks, recomputed_blocks: of these, needed again:
    the thrashing that the decoupled-exploration thesis counts (Algorithm 1).
    """

    needed_tokens: int = 0
    prefilled_tokens: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    evicted_blocks: int = 0
    loaded_blocks: int = 0
    recomputed_blocks: int = 0

    def __add__(self, other: CacheCounts) -> CacheCounts:
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        return CacheCounts(*(own + its for own, its in pairs))


@dataclass(frozen=True)
class CacheStats:
    """The same between two moments, see `CacheCounts`.

    hit_rate: reused_tokens / needed_tokens, None where nothing was needed. reused_tokens: of those
    needed, on the device ever since they were written or needed last.
    """

    hit_rate: float | None
    needed_tokens: int
    reused_tokens: int
    loaded_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    evicted_blocks: int
    loaded_blocks: int
    recomputed_blocks: int

    @classmethod
    def between(cls, now: CacheCounts, then: CacheCounts | None = None) -> CacheStats:
        """What has been counted since `then`, or since the store was made."""
        since = then or CacheCounts()
        found = {
            each.name: getattr(now, each.name) - getattr(since, each.name) for each in fields(now)
        }
        missed = ("prefilled", "loaded", "recomputed")
        reused = found["needed_tokens"] - sum(found[f"{kind}_tokens"] for kind in missed)
        rate = reused / found["needed_tokens"] if found["needed_tokens"] else None
        return cls(hit_rate=rate, reused_tokens=reused, **found)


@dataclass
class SparseCounts:
    """What sparse decoding did, of one model since its store was made.

    tokens: of rows that selected. visible_tokens, selected_tokens: that these saw, and attended to.
    left_out: of the attention of so many `num_heads` (layers, heads and tokens), what was not
    selected, or at most; none where the scores do not say. corrections: heads whose predicted query
    was too far off.

    Of a rank that works beside the decoder: takes: selections that a layer took; late: of them,
    those it waited for, waited_s in all; reused: those it did without. forward_s: of decoding the
    rows' tokens, waits left out; rank_s: of the rank's own work; link_s: of it, on the link.
    """

    takes: int = 0
    late: int = 0
    reused: int = 0
    waited_s: float = 0.0
    forward_s: float = 0.0
    rank_s: float = 0.0
    link_s: float = 0.0
    tokens: int = 0
    visible_tokens: int = 0
    selected_tokens: int = 0
    left_out: float = 0.0
    num_heads: int = 0
    corrections: int = 0


@dataclass
class ResidencyCounts:
    """What residency did. Bytes are the link's own business."""

    stall_s: float = 0.0
    recomputed_tokens: int = 0
    cancelled: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)
    sparse: SparseCounts = field(default_factory=SparseCounts)
