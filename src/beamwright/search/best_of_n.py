"""Best-of-n: n independent paths from the root; nothing is pruned. n = 1 is one sample."""

from __future__ import annotations

from beamwright.config import SearchSettings
from beamwright.protocols import Action, Complete, Extend, Finish
from beamwright.tree import SearchTree


class BestOfN:
    """Every unfinished path goes on until it ends, or until the rounds are used up."""

    def __init__(self, settings: SearchSettings) -> None:
        self.n = settings.n
        self.max_rounds = settings.max_rounds

    def select(self, tree: SearchTree) -> list[Action]:
        """See `protocols.Strategy`."""
        if tree.rounds == 0:
            return [Extend(tree.root, self.n)]
        candidates = tree.candidates()
        going = [node for node in candidates if not node.ended]
        actions: list[Action] = [Complete(node) for node in candidates if node.ended]
        if not going:
            return [*actions, Finish()]
        if tree.rounds >= self.max_rounds:
            return [*actions, Finish(f"{len(going)} of {self.n} paths reached --max-rounds")]
        return [*actions, *(Extend(node, 1) for node in going)]
