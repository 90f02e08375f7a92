"""Particle filtering (Puri et al. 2025): resample paths in proportion to exp(score / temperature).

The particles are the unfinished paths of a round. Systematic resampling draws one particle for each
free place. In published filters, finished particles are also resampled and may be dropped. Here
they keep their places: they cost nothing more, and a search must end with exactly n answers.
"""

from __future__ import annotations

from random import Random

from beamwright.protocols import Action
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.rounds import (
    effective_sample_size,
    give_children,
    open_round,
    score_weights,
    systematic_resample,
)
from beamwright.tree import SearchTree


@strategy(
    "particles",
    meaning="paths resampled in proportion to exp(score / temperature)",
    commits=True,
    needs_scores=True,
)
class ParticleFilter(SearchPolicy):
    """Particle filter with n particles.

    The particles are resampled if their effective sample size is at most `ess` times their number.
    """

    score_temperature: float = option(1.0, gt=0, help="Temperature of the softmax over scores.")
    ess: float = option(
        1.0,
        ge=0,
        le=1,
        metavar="SHARE",
        help="Resample when the effective share of paths is at most this.",
    )

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        this = open_round(tree, self.search)
        if not this.going:
            return this.actions
        scores = [node.score for node in this.going]
        weights = score_weights(scores, "softmax", self.score_temperature)
        # Pruned duplicates leave free places, which only resampling can fill.
        crowded = len(this.going) != this.slots
        if crowded or effective_sample_size(weights) <= self.ess * len(weights) * (1 + 1e-9):
            shares = systematic_resample(weights, this.slots, rng.random())
        else:
            shares = [1] * len(weights)
        return [*this.actions, *give_children(this.going, shares)]
