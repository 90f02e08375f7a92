"""Pairwise covering arrays: few rows in which every two settings meet. Tests use it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Row = Mapping[str, Any]


def pairs(row: Row) -> set[Any]:
    return set(combinations(sorted(row.items()), 2))


def covering_array(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows in which every pair of values of two factors occurs; greedy, deterministic."""
    bits: dict[Any, int] = {}
    rows: list[tuple[tuple[int, ...], int]] = [((), 0)]  # places of values; bits of their pairs
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
    """Bits of the pairs of one more value with those of a row, a bit for each pair there is."""
    met = ((place, at, *value) for place, at in enumerate(row))
    return sum(1 << bits.setdefault(pair, len(bits)) for pair in met)
