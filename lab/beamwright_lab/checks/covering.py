"""Pairwise covering arrays: few rows in which every two settings meet. Tests use it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = Mapping[str, Any]


def pairs(row: Row) -> set[Any]:
    return set(combinations(sorted(row.items()), 2))


def covering_array(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows in which every pair of values of two factors occurs; greedy, deterministic."""
    rows: list[Row] = [dict(zip(factors, v, strict=True)) for v in product(*factors.values())]
    met = [pairs(row) for row in rows]
    missing = set().union(*met)
    chosen: list[Row] = []
    while missing:
        best = max(range(len(rows)), key=lambda at: len(missing & met[at]))
        chosen.append(rows[best])
        missing -= met[best]
    return chosen
