"""Strategies best-of-n, majority and weighted: n independent paths, without pruning.

The strategies differ only in how they choose the answer. With n = 1, each is one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beamwright.protocols import Action, EndSearch, Extend, FinishPath, Prospect
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.prospects import predict_certain
from beamwright.tree import Node, SearchTree


class IndependentPaths(SearchPolicy):
    """Base class of strategies with independent paths: every unfinished path is extended."""

    foresees_by_score, certain = False, True

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        return predict_certain([*beams, *ahead], self.search.max_rounds)


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
    """Strategy that extends every unfinished path until it ends or has `max_rounds` steps.

    With `wave`, the next paths begin when all earlier paths have ended or are cut off. A stop rule
    that ends the search between two waves (`--stop-votes`, `--stop-confidence`) saves the remaining
    paths.
    """

    wave: int | None = option(
        None,
        "Paths per wave; the next wave starts unless a stop rule holds.",
        ge=1,
        metavar="PATHS",
    )

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        n, most = self.search.n, self.search.max_rounds
        if tree.rounds == 0:
            return [Extend(tree.root, min(n, self.wave or n))]
        # Paths that reached max_rounds without ending remain candidates until the search ends.
        candidates = tree.candidates()
        cut = [node for node in candidates if not node.ended and node.depth >= most <= node.level]
        going = [Extend(node, 1) for node in candidates if not node.ended and node not in cut]
        actions: list[Action] = [FinishPath(node) for node in candidates if node.ended]
        left = n - len(tree.root.children)
        if going or left:
            return [*actions, *(going or [Extend(tree.root, min(left, self.wave or left))])]
        return [
            *actions,
            EndSearch(f"{len(cut)} of {n} paths reached --max-rounds" if cut else None),
        ]
