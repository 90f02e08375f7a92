"""Pairwise covering arrays: few combinations of settings in which each pair of values occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Row = Mapping[str, Any]


def pairs(row: Row) -> set[Any]:
    """Return all pairs of (factor, value) of a row."""
    return set(combinations(sorted(row.items()), 2))


def covering_array(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return rows in which each pair of values of two factors occurs (greedy, deterministic)."""
    bits: dict[Any, int] = {}
    rows: list[tuple[tuple[int, ...], int]] = [((), 0)]  # indices of values; bit set of their pairs
    for later, values in enumerate(factors.values()):
        rows = [
            ((*row, at), met + _bits_of(bits, row, (later, at)))
            for row, met in rows
            for at in range(len(values))
        ]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(rows, key=lambda row: (missing & row[1]).bit_count())
        values_of = zip(factors.items(), best[0], strict=True)
        chosen.append({name: values[at] for (name, values), at in values_of})
        missing &= ~best[1]
    return chosen


def _bits_of(bits: dict[Any, int], row: tuple[int, ...], value: tuple[int, int]) -> int:
    """Return the bits of the pairs that `value` forms with a row; new pairs get a new bit."""
    met = ((place, at, *value) for place, at in enumerate(row))
    return sum(1 << bits.setdefault(pair, len(bits)) for pair in met)
