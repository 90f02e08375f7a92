"""best-of-n, majority, weighted: n independent paths, nothing pruned, and three final choices.

n = 1 is one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beamwright.protocols import Action, Complete, Extend, Finish, Prospect
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.prospects import certain
from beamwright.tree import Node, SearchTree


class IndependentPaths(SearchPolicy):
    """Paths that take no places from one another: each of them surely goes on."""

    foresees_by_score, certain = False, True

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
    "best-of-n", meaning="n independent paths, the best-scored answer", commits=True, competes=False
)
class BestOfN(IndependentPaths):
    """Every unfinished path goes on until it ends, or until the rounds are used up.

    In waves the next paths begin when all of those before have ended, so that what stops the search
    in between (`--stop-votes`, `--stop-confidence`) spares them.
    """

    wave: int | None = option(
        None, "Paths at a time; the next begin if nothing stops the search.", ge=1, metavar="PATHS"
    )

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        n, most = self.search.n, self.search.max_rounds
        if tree.rounds == 0:
            return [Extend(tree.root, min(n, self.wave or n))]
        candidates = tree.candidates()  # paths that were cut off stay among them to the end
        cut = [node for node in candidates if not node.ended and node.depth >= most <= node.level]
        going = [Extend(node, 1) for node in candidates if not node.ended and node not in cut]
        actions: list[Action] = [Complete(node) for node in candidates if node.ended]
        left = n - len(tree.root.children)
        if going or left:
            return [*actions, *(going or [Extend(tree.root, min(left, self.wave or left))])]
        return [*actions, Finish(f"{len(cut)} of {n} paths reached --max-rounds" if cut else None)]
