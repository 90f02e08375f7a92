"""How many beams run in each group, from counts alone (LBS paper, section 4.2)."""

from __future__ import annotations


def balanced_sizes(num_beams: int, capacity_beams: int) -> list[int]:
    """Fewest groups, sizes as even as possible, smaller ones first.

    The first groups leave the headroom into which the next group is fetched.
    """
    if num_beams == 0:
        return []
    num_groups = -(-num_beams // capacity_beams)
    size, num_larger = divmod(num_beams, num_groups)
    return [size] * (num_groups - num_larger) + [size + 1] * num_larger


def packed_sizes(num_beams: int, capacity_beams: int) -> list[int]:
    """Fewest groups, every one but the last full."""
    full, rest = divmod(num_beams, capacity_beams)
    return [capacity_beams] * full + ([rest] if rest else [])
