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
    missing = set().union(*map(pairs, rows))
    chosen: list[Row] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing & pairs(row))))
        missing -= pairs(chosen[-1])
    return chosen
