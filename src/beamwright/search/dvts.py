"""Diverse verifier tree search (DVTS): n / width subtrees, each of which keeps its best child.

Subtrees never compete with each other. Each has `width` places, and finished paths keep their
places, so a search ends with exactly n paths. In search-and-learn, a subtree whose best child has
ended is instead reduced to that one path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

from beamwright.protocols import Action, Extend, FinishPath, Prospect, Prune
from beamwright.search import strategy
from beamwright.search.beam import BeamSearch
from beamwright.search.prospects import best_first
from beamwright.search.rounds import open_round, sort_by_rank, subtree_of
from beamwright.tree import Node, SearchTree


@strategy(
    "dvts",
    meaning="n / width separate subtrees, the best of width children in each",
    commits=True,
    reads_width=True,
    needs_scores=True,
    apart=True,
)
class DiverseTrees(BeamSearch):
    """Diverse verifier tree search: n / width subtrees, each of which keeps its best child.

    Subtree s starts from the root's children s * width to (s + 1) * width - 1.

    Raises:
        InputError: if n < width, or if n is not a multiple of width.
    """

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        width = self.search.width
        this = open_round(tree, self.search, apart=width)
        if not this.going:
            return this.actions
        ended = [action.node for action in this.actions if isinstance(action, FinishPath)]
        taken = Counter(subtree_of(node, width) for node in (*tree.finished(), *ended))
        actions = this.actions.copy()
        for number, nodes in sorted(self._subtrees(this.going).items()):
            best, *rest = sort_by_rank(nodes)
            actions += [Extend(best, width - taken[number]), *map(Prune, rest)]
        return actions

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """Predict the extended steps of each subtree separately: subtrees do not compete."""
        families = self._subtrees(beams).values()
        return best_first(each for family in families for each in self.predict_extended(family))

    def _subtrees(self, nodes: Iterable[Node]) -> dict[int, list[Node]]:
        """Return the nodes of each subtree, by the subtree's number."""
        subtrees: dict[int, list[Node]] = {}
        for node in nodes:
            subtrees.setdefault(subtree_of(node, self.search.width), []).append(node)
        return subtrees
