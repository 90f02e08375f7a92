"""Lookahead: beam search whose candidates are rated by where a rollout of k steps leads.

A cycle of k + 1 rounds: candidates are written, each is rolled out by k greedy steps of one path,
and the score of the rollout's end decides which candidates survive. Rollouts are then dropped.
search-and-learn writes such rollouts, too, but its scores do not use them.
"""

from __future__ import annotations

from beamwright.config import SearchSettings
from beamwright.protocols import Action, Extend, Prune
from beamwright.search.beam import check_width, extend_best
from beamwright.search.ranking import ranked
from beamwright.search.rounds import open_round
from beamwright.tree import Node, SearchTree

STEPS = 1


class Lookahead:
    """n candidates a cycle, `width` children per survivor.

    Raises:
        InputError: if n < width, or width does not divide n.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.steps = settings.lookahead or STEPS
        check_width(settings)

    def select(self, tree: SearchTree) -> list[Action]:
        """See `protocols.Strategy`."""
        leaves = tree.candidates()
        rolled = max((leaf.depth - rolled_from(leaf).depth for leaf in leaves), default=0)
        if rolled == 0:
            level = max((leaf.depth for leaf in leaves), default=0)
            this = open_round(tree, self.settings, level)
            if this.decided:
                return list(this.actions)
            return [*this.actions, *(Extend(node, 1, greedy=True) for node in this.going)]
        rolling = [leaf for leaf in leaves if not leaf.ended]
        if rolled < self.steps and rolling:
            return [Extend(leaf, 1, greedy=True) for leaf in rolling]
        best = [rolled_from(leaf) for leaf in ranked(leaves)]
        slots = self.settings.n - len(tree.finished())
        rollouts = [node for leaf in leaves for node in rollout(leaf)]
        return [*map(Prune, rollouts), *extend_best(best, slots, self.settings.width)]


def rollout(leaf: Node) -> list[Node]:
    """The steps of a rollout, the last one first; empty if the leaf is no rollout."""
    return [node for node in reversed(leaf.path()) if node.greedy]


def rolled_from(leaf: Node) -> Node:
    """The candidate whose rollout ends in this leaf; itself, if it is none."""
    node = leaf
    while node.greedy and node.parent is not None:
        node = node.parent
    return node
