"""search-and-learn's beam search, rule for rule: a plug-in, with `--search search-and-learn`.

    beamwright eval bundled:test --plugin lab/beamwright_lab/search_and_learn.py \\
        --search search-and-learn --n 16 --width 4

Its rules, which the plain `beam` does not follow: every round replicates the survivors to n, so
that a search can finish more than n paths; survivors are the last n / width of an ascending sort
over the list of beams (its sort leaves ties open; here the later of two equals wins); of more than
n finished paths the first n to finish count, and fewer are repeated up to n.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.search import SearchPolicy, strategy
from beamwright.search.rounds import duplicates, even_shares, give_children
from beamwright.tree import Node, SearchTree

T = TypeVar("T")


def top_indices(scores: Sequence[float | None], count: int) -> set[int]:
    """Places of the `count` last in an ascending stable sort; a missing score sorts first.

    A count of 0 means all of them.
    """
    order = sorted(
        range(len(scores)), key=lambda i: float("-inf") if (s := scores[i]) is None else s
    )
    return set(order[-count:])


def in_list_order(nodes: Sequence[Node]) -> list[Node]:
    """Nodes of one round in the order of search-and-learn's list of beams."""

    def key(node: Node) -> tuple[int, ...]:
        # Copy number of each ancestor, the newest first: the list is sorted by it.
        return tuple(int(part) for part in reversed(node.lineage[1:]))

    return sorted(nodes, key=key)


def final_candidates(finished: Sequence[Node], n: int) -> list[Node]:
    """n finished paths in the order of finishing: by round, then by place in the list."""
    by_round: list[Node] = []
    for depth in sorted({node.depth for node in finished}):
        by_round += in_list_order([node for node in finished if node.depth == depth])
    return padded(by_round, n)


def padded(finished: Sequence[T], n: int) -> list[T]:
    """The first n; fewer are repeated in turn until there are n."""
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
    """Stateless: the order of its list of beams is read from the tree.

    Survivors keep the list's order; round-robin replication makes the list s0, s1, ..., s0, ...,
    so a beam's place is its ordinal among its parent's children times the number of survivors,
    plus its parent's place.
    """

    @property
    def num_survivors(self) -> int:
        """0 keeps all, as there."""
        return self.search.n // self.search.width

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        settings = self.search
        if tree.rounds == 0:
            return [Extend(tree.root, settings.n)]
        beams = in_list_order(tree.candidates())
        ended = [node for node in beams if node.ended]
        actions: list[Action] = [*map(Complete, ended)]
        active = [node for node in beams if not node.ended]
        if settings.filter_duplicates:
            dropped = duplicates(active)
            actions += map(Prune, dropped)
            active = [node for node in active if node not in dropped]
        if not active:
            return [*actions, Finish()]
        if tree.rounds >= settings.max_rounds:
            return [*actions, Finish(f"{len(active)} paths reached --max-rounds")]
        survivors = top_indices([node.score for node in active], self.num_survivors)
        kept = [node for place, node in enumerate(active) if place in survivors]
        actions += [Prune(node) for place, node in enumerate(active) if place not in survivors]
        return [*actions, *give_children(kept, even_shares(settings.n, len(kept)))]
