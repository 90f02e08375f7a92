"""What must cross the link, from the tree and the budget alone."""

from __future__ import annotations

from collections.abc import Iterable


def dm_lower_bound_bytes(needed_bytes: Iterable[int], budget_bytes: int) -> int:
    """Sum over rounds of max(0, distinct sealed bytes needed - device KV budget).

    needed_bytes: per round, the KV bytes of the distinct nodes that the round's beams extend.
    """
    return sum(max(0, needed - budget_bytes) for needed in needed_bytes)
