"""What an order of beams costs, in FlashTTS's terms (section 4.2, appendix A.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from beamwright.protocols import KVDemand
from beamwright.schedule.forest import Forest
from beamwright.schedule.prefix_order import trie


def eviction_cost(
    demand: KVDemand, groups: Iterable[Sequence[int]], *, in_bytes: bool = False
) -> int:
    """Cost = sum over i of Nodes(T_i) - P(T_i, T_{i+1}): what each next group evicts.

    The last group evicts nothing. in_bytes: sizes of the nodes instead of their number.
    """
    tries = [trie(demand, group) for group in groups]
    gone = [before - after for before, after in pairwise(tries)]
    return sum(
        sum(map(demand.segment_bytes.__getitem__, nodes)) if in_bytes else len(nodes)
        for nodes in gone
    )


def shared_prefixes(forest: Forest, order: Iterable[int]) -> int:
    """Score(S) of Appendix A.2: the sum of P(c_k, c_{k+1}), every beam a batch of its own."""
    pairs = pairwise(order)
    return sum(forest.common_bytes(min(pair), max(pair)) for pair in pairs)
