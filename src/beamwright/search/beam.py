"""Step-wise beam search (LBS section 2.3): keep the n / width best steps of each round."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from beamwright.errors import InputError
from beamwright.protocols import Action, Prospect
from beamwright.registry import LAB_HINT, option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.prospects import FORESIGHTS
from beamwright.search.rounds import even_shares, give_children, open_round, sort_by_rank
from beamwright.tree import Node, SearchTree

# Token limits of the first, second, ... step (FlashTTS, Fig. 11).
VARYING_LIMITS = (64, 64, 64, 2048)


@strategy(
    "varying",
    meaning="beam search with short first steps: 64 tokens three times, then up to 2048",
    commits=True,
    step_limits=VARYING_LIMITS,
    reads_width=True,
    needs_scores=True,
)
@strategy(
    "beam",
    meaning="keep the best n / width steps per round, each with width children",
    commits=True,
    reads_width=True,
    needs_scores=True,
)
class BeamSearch(SearchPolicy):
    """Beam search: the n / width best candidates of a round get `width` children each.

    Raises:
        InputError: if n < width, or if n is not a multiple of width.
    """

    foresight: Literal["scores", "bins"] = option(
        "scores",
        help="What ranks steps for speculation: their own scores, or the bins of their parents' "
        "scores (FlashTTS's SelectSPEC).",
    )

    def model_post_init(self, context: Any) -> None:
        n, width = self.search.n, self.search.width
        if n < width:
            raise InputError(f"--n {n} is smaller than --width {width}; raise --n or lower --width")
        if n % width:
            raise InputError(
                f"--n {n} is not a multiple of --width {width}; use {-(-n // width) * width}"
            )
        if self.foresight not in FORESIGHTS:
            raise InputError(f"--foresight {self.foresight}: {LAB_HINT}")

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        this = open_round(tree, self.search)
        if not this.going:
            return this.actions
        return [
            *this.actions,
            *extend_best(sort_by_rank(this.going), this.slots, self.search.width),
        ]

    @property
    def foresees_by_score(self) -> bool:  # type: ignore[override]
        """False for `bins` (SelectSPEC), which reads no score of the current round."""
        return self.foresight == "scores"

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        return self.predict_extended(beams)

    def predict_extended(self, beams: Sequence[Node]) -> list[Prospect]:
        """Predict which of `beams` selection extends, if all of them compete with each other."""
        return FORESIGHTS[self.foresight](beams, self.search.width, self.search.max_rounds)


def extend_best(best_first: Sequence[Node], slots: int, width: int) -> list[Action]:
    """Give `slots` children evenly to the best ceil(slots / width) nodes, and prune the rest.

    best_first: the nodes to decide, sorted by score. If the division leaves a remainder, the best
        nodes get one child more.
    """
    num_survivors = min(len(best_first), -(-slots // width))
    shares = even_shares(slots, num_survivors) + [0] * (len(best_first) - num_survivors)
    return give_children(best_first, shares)
