"""Plugin with search-and-learn's beam search, rule by rule: `--search search-and-learn`.

    beamwright eval bundled:test --plugin lab/beamwright_lab/search_and_learn.py \\
        --search search-and-learn --n 16 --width 4

It differs from `beam` in three rules. Each round replicates the survivors to n, so a search can
finish more than n paths. Survivors are the last n / width of an ascending sort over the list of
beams (of two equal scores, the later beam wins here; the original leaves that open). If more than n
paths finish, the first n count; if fewer do, they are repeated up to n.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from beamwright.protocols import Action, EndSearch, Extend, FinishPath, Prune
from beamwright.search import SearchPolicy, strategy
from beamwright.search.rounds import even_shares, find_duplicates, give_children
from beamwright.tree import Node, SearchTree

T = TypeVar("T")


def top_indices(scores: Sequence[float | None], count: int) -> set[int]:
    """Return the indices of the last `count` scores in a stable ascending sort.

    None sorts first. A count of 0 means all.
    """
    order = sorted(
        range(len(scores)), key=lambda i: float("-inf") if (s := scores[i]) is None else s
    )
    return set(order[-count:])


def in_list_order(nodes: Sequence[Node]) -> list[Node]:
    """Sort the nodes of one round as search-and-learn's list of beams is sorted."""

    def key(node: Node) -> tuple[int, ...]:
        # Child number of each ancestor, the newest first.
        return tuple(int(part) for part in reversed(node.lineage[1:]))

    return sorted(nodes, key=key)


def final_candidates(finished: Sequence[Node], n: int) -> list[Node]:
    """Return n finished paths, ordered by the round in which they ended, then as in the list."""
    by_round: list[Node] = []
    for depth in sorted({node.depth for node in finished}):
        by_round += in_list_order([node for node in finished if node.depth == depth])
    return padded(by_round, n)


def padded(finished: Sequence[T], n: int) -> list[T]:
    """Return the first n; if there are fewer, repeat them in turn."""
    if not finished:
        return []
    repeats = -(-n // len(finished))
    return [*finished, *(list(finished) * (repeats - 1))][:n]


@strategy(
    "search-and-learn",
    meaning="beam search by search-and-learn's rules: it refills to n, and the first n paths count",
    commits=True,
    reads_width=True,
    needs_scores=True,
    finals=final_candidates,
)
class SearchAndLearnBeam(SearchPolicy):
    """search-and-learn's beam search. It keeps no state: the tree gives the order of its beam list.

    Survivors keep the list's order, and replication makes the list s0, s1, ..., s0, s1, .... So a
    beam's index is its number among its parent's children times the number of survivors, plus its
    parent's index.
    """

    @property
    def num_survivors(self) -> int:
        """Return how many beams survive; 0 keeps all, as in search-and-learn."""
        return self.search.n // self.search.width

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        settings = self.search
        if tree.rounds == 0:
            return [Extend(tree.root, settings.n)]
        beams = in_list_order(tree.candidates())
        ended = [node for node in beams if node.ended]
        actions: list[Action] = [*map(FinishPath, ended)]
        active = [node for node in beams if not node.ended]
        if settings.filter_duplicates:
            dropped = find_duplicates(active)
            actions += map(Prune, dropped)
            active = [node for node in active if node not in dropped]
        if not active:
            return [*actions, EndSearch()]
        if tree.rounds >= settings.max_rounds:
            return [*actions, EndSearch(f"{len(active)} paths reached --max-rounds")]
        survivors = top_indices([node.score for node in active], self.num_survivors)
        kept = [node for place, node in enumerate(active) if place in survivors]
        actions += [Prune(node) for place, node in enumerate(active) if place not in survivors]
        return [*actions, *give_children(kept, even_shares(settings.n, len(kept)))]
