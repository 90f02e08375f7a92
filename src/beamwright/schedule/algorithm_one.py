"""Algorithm 1 of the LBS paper (BeamSet): group beams greedily by shared prefix.

A group starts with one beam. The beam that shares the most KV with the group is added next, until
the group has its size or the device is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from beamwright.schedule.forest import Forest, Overlap


def make_beam_sets(
    forest: Forest,
    *,
    balance: bool = True,
    max_batch: int | None = None,
    arrival: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return groups of beam numbers, in running order; beams are listed in order of selection.

    The group size is at most `capacity_beams`. A group ends early if its next beam does not fit. A
    beam larger than the capacity is a group of its own.

    Args:
        balance: use the fewest groups with even sizes; False fills each group up to the limit.
        max_batch: maximum number of beams of a group; None for no limit.
        arrival: beam numbers in the order in which groups take them, regardless of shared prefixes
            (no inter-beam locality); None takes the beam with the largest overlap.
    """
    limit = capacity_beams(forest, max_batch)
    unused = dict.fromkeys(range(len(forest)) if arrival is None else arrival)
    groups: list[list[int]] = []
    while unused:
        # Balanced: the fewest groups, as even as possible. Smaller groups come first, because they
        # leave free memory into which the next group is prefetched.
        size = len(unused) // -(-len(unused) // limit) if balance else limit
        groups.append(_form_group(forest, unused, size, arrival is None))
    return groups


def capacity_beams(forest: Forest, max_batch: int | None = None) -> int:
    """Return the paper's #Beam: capacity divided by the bytes of the largest beam, at least 1."""
    largest = max(map(forest.beam_bytes, range(len(forest))), default=0)
    limit = forest.capacity_bytes // largest if largest else len(forest)
    return max(1, min(limit, max_batch or limit))


def _form_group(forest: Forest, unused: dict[int, None], size: int, by_overlap: bool) -> list[int]:
    """Form the next group: remove at most `size` beams from `unused`, and return them.

    The group also ends before its KV exceeds the capacity. by_overlap: take the beam that shares
    the most KV with the group; else take the beams in order.
    """
    overlap = Overlap(forest)
    group: list[int] = []
    need = 0
    ranked: list[tuple[int, int]] = []
    arriving = iter(list(unused))
    while unused and len(group) < size:
        best = _largest_overlap(ranked, overlap, unused) if by_overlap else next(arriving)
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


def _largest_overlap(
    ranked: list[tuple[int, int]], overlap: Overlap, unused: dict[int, None]
) -> int:
    """Return the unused beam that shares the most KV with the group; ties go to the lower number.

    ranked: heap of (-overlap, beam). Entries with an old overlap or a used beam are dropped.
    """
    while ranked:
        negative, beam = ranked[0]
        if beam in unused and -negative == overlap.overlap_bytes[beam]:
            return beam
        heappop(ranked)
    return next(iter(unused))
