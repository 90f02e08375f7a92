"""Lookahead search: beam search that scores each candidate by the end of a k-step rollout.

A cycle has k + 1 rounds. The first round decodes the candidates. The next k rounds extend each
candidate by a rollout (one greedy path of k steps). The score at the rollout's end decides whether
the candidate survives. Then all rollouts are pruned. search-and-learn also decodes such rollouts,
but does not score them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beamwright.protocols import Action, Extend, Prospect, Prune
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.beam import BeamSearch, extend_best
from beamwright.search.prospects import predict_certain
from beamwright.search.rounds import open_round, sort_by_rank
from beamwright.tree import Node, SearchTree


@strategy(
    "lookahead",
    meaning="beam search that scores a candidate by a greedy rollout of k steps",
    by_level=False,
    reads_width=True,
    needs_scores=True,
)
class Lookahead(BeamSearch):
    """Lookahead search with n candidates per cycle and `width` children per survivor.

    Raises:
        InputError: if n < width, or if n is not a multiple of width.
    """

    lookahead: int = option(1, ge=1, metavar="STEPS", help="Steps of a greedy rollout.")

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        leaves = tree.candidates()
        rolled = max((leaf.level - rollout_start(leaf).level for leaf in leaves), default=0)
        if rolled == 0:
            level = max((leaf.level for leaf in leaves), default=0)
            this = open_round(tree, self.search, level)
            if not this.going:
                return this.actions
            return [*this.actions, *(Extend(node, 1, greedy=True) for node in this.going)]
        rolling = [leaf for leaf in leaves if not leaf.ended]
        if rolled < self.lookahead and rolling:
            return [Extend(leaf, 1, greedy=True) for leaf in rolling]
        best = [rollout_start(leaf) for leaf in sort_by_rank(leaves)]
        slots = self.search.n - len(tree.finished())
        rollouts = [node for leaf in leaves for node in rollout_steps(leaf)]
        return [*map(Prune, rollouts), *extend_best(best, slots, self.search.width)]

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """Predict one greedy child for every leaf whose rollout has steps left.

        This prediction is always right. Which candidates survive is not predicted.
        """
        going = [leaf for leaf in beams if leaf.level - rollout_start(leaf).level < self.lookahead]
        return predict_certain(going, self.search.max_rounds, greedy=True)


def rollout_steps(leaf: Node) -> list[Node]:
    """Return the steps of the rollout that ends in `leaf`, the last step first.

    The list is empty if `leaf` belongs to no rollout.
    """
    return [node for node in reversed(leaf.path()) if node.greedy]


def rollout_start(leaf: Node) -> Node:
    """Return the candidate from which the rollout of `leaf` started; `leaf` itself without one."""
    node = leaf
    while node.greedy and node.parent is not None:
        node = node.parent
    return node
