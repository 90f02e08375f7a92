"""Step-wise beam search (LBS section 2.3): expand, rate, keep the best k = n / width.

Finished candidates keep their place: a round extends n minus the finished, so that a search ends
with exactly n candidates. search-and-learn replicates to n every round and overshoots (FACTS 3).
"""

from __future__ import annotations

from beamwright.config import SearchSettings
from beamwright.errors import InputError
from beamwright.protocols import Action, Complete, Extend, Finish, Prune
from beamwright.search.ranking import duplicates, ranked
from beamwright.tree import Node, SearchTree


class BeamSearch:
    """n candidates a round, `width` children per survivor.

    Raises:
        InputError: if n < width, or width does not divide n.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.n, self.width = settings.n, settings.width
        self.max_rounds = settings.max_rounds
        self.filter_duplicates = settings.filter_duplicates
        if self.n < self.width:
            raise InputError(f"--n {self.n} is smaller than --width {self.width}")
        if self.n % self.width:
            raise InputError(f"--n {self.n} is not a multiple of --width {self.width}")

    def select(self, tree: SearchTree) -> list[Action]:
        """See `protocols.Strategy`."""
        if tree.rounds == 0:
            return [Extend(tree.root, self.n)]
        candidates = tree.candidates()
        dropped = duplicates(candidates) if self.filter_duplicates else []
        ended = [node for node in candidates if node.ended and node not in dropped]
        going = [node for node in candidates if not node.ended and node not in dropped]
        actions: list[Action] = [*map(Prune, dropped), *map(Complete, ended)]
        slots = self.n - len(tree.finished()) - len(ended)
        if slots <= 0:
            return [*actions, *map(Prune, going), Finish()]
        if not going:
            return [*actions, Finish(f"{slots} of {self.n} paths were duplicates")]
        if tree.rounds >= self.max_rounds:
            return [*actions, Finish(f"{slots} of {self.n} paths reached --max-rounds")]
        return [*actions, *self._extend(ranked(going), slots)]

    def _extend(self, best_first: list[Node], slots: int) -> list[Action]:
        """Share `slots` children among the best ceil(slots / width); the best get one more."""
        num_survivors = min(len(best_first), -(-slots // self.width))
        share, extra = divmod(slots, num_survivors)
        survivors = best_first[:num_survivors]
        return [
            *(Extend(node, share + (i < extra)) for i, node in enumerate(survivors)),
            *map(Prune, best_first[num_survivors:]),
        ]
