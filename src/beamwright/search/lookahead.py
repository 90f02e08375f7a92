"""Lookahead: beam search whose candidates are rated by where a rollout of k steps leads.

A cycle of k + 1 rounds: candidates are written, each is rolled out by k greedy steps of one path,
and the score of the rollout's end decides which candidates survive. Rollouts are then dropped.
search-and-learn writes such rollouts, too, but its scores do not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beamwright.protocols import Action, Extend, Prospect, Prune
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.beam import BeamSearch, extend_best
from beamwright.search.prospects import certain
from beamwright.search.rounds import open_round, ranked
from beamwright.tree import Node, SearchTree


@strategy(
    "lookahead",
    meaning="beam search that scores a candidate by a greedy rollout of k steps",
    by_level=False,
    reads_width=True,
    needs_scores=True,
)
class Lookahead(BeamSearch):
    """n candidates a cycle, `width` children per survivor.

    Raises:
        InputError: if n < width, or width does not divide n.
    """

    lookahead: int = option(1, ge=1, metavar="STEPS", help="Steps of a rollout.")

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        leaves = tree.candidates()
        rolled = max((leaf.level - rolled_from(leaf).level for leaf in leaves), default=0)
        if rolled == 0:
            level = max((leaf.level for leaf in leaves), default=0)
            this = open_round(tree, self.search, level)
            if not this.going:
                return this.actions
            return [*this.actions, *(Extend(node, 1, greedy=True) for node in this.going)]
        rolling = [leaf for leaf in leaves if not leaf.ended]
        if rolled < self.lookahead and rolling:
            return [Extend(leaf, 1, greedy=True) for leaf in rolling]
        best = [rolled_from(leaf) for leaf in ranked(leaves)]
        slots = self.search.n - len(tree.finished())
        rollouts = [node for leaf in leaves for node in rollout(leaf)]
        return [*map(Prune, rollouts), *extend_best(best, slots, self.search.width)]

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """A rollout is certain up to its last step; where that leads is not foreseen."""
        going = [leaf for leaf in beams if leaf.level - rolled_from(leaf).level < self.lookahead]
        return certain(going, self.search.max_rounds, greedy=True)


def rollout(leaf: Node) -> list[Node]:
    """The steps of a rollout, the last one first; empty if the leaf is no rollout."""
    return [node for node in reversed(leaf.path()) if node.greedy]


def rolled_from(leaf: Node) -> Node:
    """The candidate whose rollout ends in this leaf; itself, if it is none."""
    node = leaf
    while node.greedy and node.parent is not None:
        node = node.parent
    return node
