"""Asynchronous sparse decoding on a virtual clock: layers in packs, and a cache rank beside them.

Three resources, each in order: the inference rank, the cache rank, and the link between them, both
directions of it at once. Knows seconds only; `cost.sparse` has them from sizes. Late is a wait:
which tokens are chosen never depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.plan.sparse import RankSeconds


def in_packs(whole: RankSeconds, num_layers: int, pack_layers: int) -> list[RankSeconds]:
    """A token's seconds in packs of so many layers; the last may have fewer."""
    packs = []
    for first in range(0, num_layers, pack_layers):
        share = min(pack_layers, num_layers - first) / num_layers
        seconds = (whole.inference_s, whole.cache_s, whole.up_s, whole.down_s)
        packs.append(RankSeconds(*(share * each for each in seconds)))
    return packs


@dataclass(frozen=True)
class PacksRun:
    """Of the second half of the tokens, when the pipeline is full.

    token_s: time per output token. waited_s: of it, the inference rank waited for a selection.
    margin_s: least time by which a selection was there before the inference rank was; negative
    where it came late.
    """

    token_s: float
    waited_s: float
    margin_s: float


def simulate_packs(
    packs: Sequence[RankSeconds],
    num_tokens: int = 64,
    *,
    distance: int | None = None,
    selection_s: float = 0.0,
) -> PacksRun:
    """Decode so many tokens of all rows, two at least, pack after pack.

    distance: what a pack attends to is chosen by queries that leave when the pack so many before
        it ends. Default: all of a token, so that the same pack of the token before chooses
        (AsyncSpade); 2: by what enters the pack before it. The first selections are there.
    selection_s: of a token, seconds in which the inference rank chooses itself (Quest).
    """
    distance = len(packs) if distance is None else distance
    ready = [0.0] * distance  # of pack number i, over all tokens
    ends: list[float] = []
    waits: list[float] = []
    margins: list[float] = []
    free_s = up_s = cache_s = down_s = 0.0  # when each resource is free
    for number in range(num_tokens * len(packs)):
        margins.append(ready[number] - free_s)
        waits.append(max(0.0, ready[number] - free_s))
        free_s += waits[-1] + packs[number % len(packs)].inference_s + selection_s / len(packs)
        ends.append(free_s)
        chosen = packs[(number + distance) % len(packs)]
        up_s = max(up_s, free_s) + chosen.up_s
        cache_s = max(cache_s, up_s) + chosen.cache_s
        down_s = max(down_s, cache_s) + chosen.down_s
        ready.append(down_s)
    half = num_tokens // 2
    from_pack = half * len(packs)
    return PacksRun(
        token_s=(ends[-1] - ends[from_pack - 1]) / (num_tokens - half),
        waited_s=sum(waits[from_pack:]) / (num_tokens - half),
        margin_s=-max(margins[from_pack:]),
    )
