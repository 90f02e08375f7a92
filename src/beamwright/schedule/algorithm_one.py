"""BeamSet by Algorithm 1 of the LBS paper: greedy groups of beams that share long prefixes.

Knows the forest and counts. Group sizes come from counts alone (section 4.2), or from the
capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from beamwright.schedule.forest import Forest, Overlap


def beam_sets(
    forest: Forest,
    *,
    balance: bool = True,
    max_batch: int | None = None,
    arrival: Sequence[int] | None = None,
) -> list[list[int]]:
    """Groups of beam numbers, each in the order in which its beams were chosen.

    #Beam is the capacity over the size of the largest beam. A group is closed early if its next
    beam does not fit; a beam that fits nowhere is a group of its own.

    arrival: take the beams in this order, whatever they share (no inter-beam locality).
    """
    limit = capacity_beams(forest, max_batch)
    unused = dict.fromkeys(range(len(forest)) if arrival is None else arrival)
    groups: list[list[int]] = []
    while unused:
        # Balanced: the fewest groups, as even as possible, smaller ones first, since they leave the
        # headroom into which the next group is fetched. Else full ones.
        size = len(unused) // -(-len(unused) // limit) if balance else limit
        groups.append(_fill(forest, unused, size, arrival is None))
    return groups


def capacity_beams(forest: Forest, max_batch: int | None = None) -> int:
    """#Beam: how many beams of the largest size fit the capacity; at least one."""
    largest = max(map(forest.beam_bytes, range(len(forest))), default=0)
    limit = forest.capacity_bytes // largest if largest else len(forest)
    return max(1, min(limit, max_batch or limit))


def _fill(forest: Forest, unused: dict[int, None], size: int, by_overlap: bool) -> list[int]:
    """One group, taken out of `unused`."""
    overlap = Overlap(forest)
    group: list[int] = []
    need = 0
    ranked: list[tuple[int, int]] = []
    arriving = iter(list(unused))
    while unused and len(group) < size:
        best = _best(ranked, overlap, unused) if by_overlap else next(arriving)
        common = 0 if forest.copy_per_beam else overlap.overlap_bytes[best]
        added = forest.beam_bytes(best) - common
        if group and need + added > forest.capacity_bytes:
            break
        need += added
        group.append(best)
        del unused[best]
        for beam in overlap.add(best):
            heappush(ranked, (-overlap.overlap_bytes[beam], beam))
    return group


def _best(ranked: list[tuple[int, int]], overlap: Overlap, unused: dict[int, None]) -> int:
    """The unused beam of largest overlap, the first of equals in depth-first order."""
    while ranked:
        negative, beam = ranked[0]
        if beam in unused and -negative == overlap.overlap_bytes[beam]:
            return beam
        heappop(ranked)
    return next(iter(unused))
