"""Order among candidates: by score, ties within 1e-6 by lineage."""

from __future__ import annotations

from collections.abc import Iterable

from beamwright.tree import Node

TIE = 1e-6  # scores this close are equal; order (lineage) decides
_TIE_DECIMALS = 6


def rank_key(node: Node) -> tuple[float, tuple[str | int, ...]]:
    """Sort key, best first. A node without a score comes last."""
    score = float("-inf") if node.score is None else round(node.score, _TIE_DECIMALS)
    return (-score, node.lineage[1:])


def ranked(nodes: Iterable[Node]) -> list[Node]:
    """Best score first; ties by lineage, so that the order never depends on the schedule."""
    return sorted(nodes, key=rank_key)


def duplicates(nodes: Iterable[Node]) -> list[Node]:
    """Nodes whose path has the same text as an earlier one's (in the order given).

    Without a tokenizer there is no text, and tokens count.
    """
    seen: set[str | tuple[int, ...]] = set()
    found: list[Node] = []
    for node in nodes:
        key = node.text or tuple(node.path_token_ids())
        if key in seen:
            found.append(node)
        seen.add(key)
    return found
