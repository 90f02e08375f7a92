"""Particle filtering (Puri et al. 2025): resample in proportion to exp(score / temperature).

Each round's unfinished paths are particles; systematic resampling draws as many as there are free
places. Published filters let finished particles be drawn, and dropped, too; here they keep their
place, since they cost nothing more and a search is to end with exactly n answers.
"""

from __future__ import annotations

import random

from beamwright.config import SearchSettings
from beamwright.protocols import Action
from beamwright.search.rounds import give_children, open_round
from beamwright.search.share import effective_size, systematic, weights_of
from beamwright.tree import SearchTree

TEMPERATURE = 1.0
_ALWAYS = 1.0


class ParticleFilter:
    """n particles; resampled where the effective sample size is at most `ess` of them."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings

    def select(self, tree: SearchTree) -> list[Action]:
        """See `protocols.Strategy`."""
        settings = self.settings
        this = open_round(tree, settings)
        if this.decided:
            return list(this.actions)
        temperature = settings.score_temperature or TEMPERATURE
        weights = weights_of([node.score for node in this.going], "softmax", temperature)
        threshold = _ALWAYS if settings.ess is None else settings.ess
        crowded = len(this.going) != this.slots  # places of duplicates are drawn again
        if crowded or effective_size(weights) <= threshold * len(weights) * (1 + 1e-9):
            shares = systematic(weights, this.slots, self._offset(tree))
        else:
            shares = [1] * len(weights)
        return [*this.actions, *give_children(this.going, shares)]

    def _offset(self, tree: SearchTree) -> float:
        """A uniform draw of its own for every seed, problem and round."""
        key = f"particles {self.settings.seed} {tree.root.lineage[0]!r} {tree.rounds}"
        return random.Random(key).random()
