"""Dynamic branching: candidates get children in proportion to their scores.

`softmax` over score / temperature is the rule of REBASE. `linear` is the rule of FlashTTS ("each
beam branches proportionally to its verifier score", Fig. 11). The numbers of children add up to the
free places; in REBASE, which rounds each number separately, their sum may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beamwright.protocols import Action, Prospect
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.prospects import predict_by_shares
from beamwright.search.rounds import (
    Branching,
    give_children,
    largest_remainder,
    open_round,
    score_weights,
    sort_by_rank,
)
from beamwright.tree import Node, SearchTree


@strategy(
    "dynamic",
    meaning="children in proportion to the score: softmax (REBASE) or linear",
    commits=True,
    needs_scores=True,
)
class DynamicBranching(SearchPolicy):
    """Dynamic branching with n candidates per round; a candidate that gets no child is pruned.

    The default temperature is REBASE's, for scores in [0, 1].
    """

    branching: Branching = option(
        "softmax", help="Children in proportion to the softmax of scores, or to scores."
    )
    score_temperature: float = option(0.2, gt=0, help="Temperature of the softmax over scores.")

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        this = open_round(tree, self.search)
        if not this.going:
            return this.actions
        best_first = sort_by_rank(this.going)
        shares = self._shares([node.score for node in best_first], this.slots)
        return [*this.actions, *give_children(best_first, shares)]

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """Predict the number of children that each beam gets, from the scores so far.

        Ended paths keep their places, so only the other beams get children.
        """
        return predict_by_shares(beams, lambda s: self._shares(s, len(s)), self.search.max_rounds)

    def _shares(self, scores: Sequence[float | None], slots: int) -> list[int]:
        """Divide `slots` children among the scores; return the number for each score."""
        if not scores:
            return []
        weights = score_weights(scores, self.branching, self.score_temperature)
        return largest_remainder(weights, slots)
