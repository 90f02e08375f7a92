"""best-of-n, majority, weighted: n independent paths, nothing pruned, and three final choices.

n = 1 is one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beamwright.protocols import Action, Complete, Extend, Finish, Prospect
from beamwright.search import SearchPolicy, strategy
from beamwright.search.prospects import certain
from beamwright.tree import Node, SearchTree


class IndependentPaths(SearchPolicy):
    """Paths that take no places from one another: each of them surely goes on."""

    foresees_by_score = False

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        return certain([*beams, *ahead], self.search.max_rounds)


@strategy(
    "weighted",
    meaning="n independent paths, the answer with the largest summed score",
    commits=True,
    choose="weighted",
    competes=False,
)
@strategy(
    "majority",
    meaning="n independent paths, the most frequent answer (self-consistency)",
    commits=True,
    choose="majority",
    competes=False,
)
@strategy(
    "best-of-n",
    meaning="n independent paths, the best-scored answer",
    commits=True,
    competes=False,
)
class BestOfN(IndependentPaths):
    """Every unfinished path goes on until it ends, or until the rounds are used up."""

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        n, max_rounds = self.search.n, self.search.max_rounds
        if tree.rounds == 0:
            return [Extend(tree.root, n)]
        candidates = tree.candidates()
        going = [node for node in candidates if not node.ended]
        actions: list[Action] = [Complete(node) for node in candidates if node.ended]
        if not going:
            return [*actions, Finish()]
        if tree.rounds >= max_rounds:
            return [*actions, Finish(f"{len(going)} of {n} paths reached --max-rounds")]
        return [*actions, *(Extend(node, 1) for node in going)]
