"""Dynamic branching: all n children are shared out in proportion to the scores.

softmax over score / temperature is REBASE's rule, the linear share FlashTTS's ("each beam branches
proportionally to its verifier score", Fig. 11). Shares are whole and add up to the free places;
REBASE rounds each on its own and can give out more or fewer.
"""

from __future__ import annotations

from beamwright.config import SearchSettings
from beamwright.protocols import Action
from beamwright.search.ranking import ranked
from beamwright.search.rounds import give_children, open_round
from beamwright.search.share import largest_remainder, weights_of
from beamwright.tree import SearchTree

TEMPERATURE = 0.2  # REBASE's for scores in [0, 1]


class DynamicBranching:
    """n candidates a round; a candidate that gets no child is pruned."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings

    def select(self, tree: SearchTree) -> list[Action]:
        """See `protocols.Strategy`."""
        settings = self.settings
        this = open_round(tree, settings)
        if this.decided:
            return list(this.actions)
        best_first = ranked(this.going)
        weights = weights_of(
            [node.score for node in best_first],
            settings.branching or "softmax",
            settings.score_temperature or TEMPERATURE,
        )
        shares = largest_remainder(weights, this.slots)
        return [*this.actions, *give_children(best_first, shares)]
