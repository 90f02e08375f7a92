"""Diverse verifier tree search: n / width subtrees that never compete; the best child of each.

search-and-learn prunes a subtree whose best child has ended to one finished path. Here each
subtree has `width` places, and its finished paths keep theirs, so a search ends with exactly n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

from beamwright.protocols import Action, Complete, Extend, Prospect, Prune
from beamwright.search.beam import check_width
from beamwright.search.declare import SearchPolicy, strategy
from beamwright.search.prospects import by_families
from beamwright.search.rounds import open_round, ranked
from beamwright.tree import Node, SearchTree


@strategy(
    "dvts",
    meaning="n / width separate subtrees, the best of width children in each",
    commits=True,
    reads_width=True,
    needs_scores=True,
)
class DiverseTrees(SearchPolicy):
    """Subtree s owns the root's children s * width to (s + 1) * width - 1.

    Raises:
        InputError: if n < width, or width does not divide n.
    """

    def model_post_init(self, context: Any) -> None:
        check_width(self.search)

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        settings = self.search
        this = open_round(tree, settings)
        if this.decided:
            return list(this.actions)
        places: defaultdict[int, int] = defaultdict(lambda: settings.width)
        fresh = [action.node for action in this.actions if isinstance(action, Complete)]
        for node in (*tree.finished(), *fresh):
            places[self._subtree(node)] -= 1
        subtrees: defaultdict[int, list[Node]] = defaultdict(list)
        for node in this.going:
            subtrees[self._subtree(node)].append(node)
        actions = list(this.actions)
        for number, nodes in sorted(subtrees.items()):
            best, *rest = ranked(nodes)
            actions += [Extend(best, places[number]), *map(Prune, rest)]
        return actions

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """By the scores within each subtree."""
        del tree, ahead
        families: defaultdict[int, list[Node]] = defaultdict(list)
        for beam in beams:
            families[self._subtree(beam)].append(beam)
        return by_families(families.values(), self.search.width, self.search.max_rounds)

    def _subtree(self, node: Node) -> int:
        ordinal = node.lineage[1]
        assert isinstance(ordinal, int)
        return ordinal // self.search.width
