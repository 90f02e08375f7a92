"""ScoringQueue: steps that wait for the verifier, a batch for each tree, in their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from beamwright.engine.turns import PriorityQueue
from beamwright.tree import Node

MOST_PASSED = 8
"""Batches of a larger priority that one may be scored behind, of those that came later."""


class ScoringQueue:
    """The verifier's work queue (decoupled tree exploration, Alg. 2).

    A turn takes the first batch, and what waits behind it while both fit `most_steps`: thesis,
    7.2, N_PRM. With 1 every tree has turns of its own.
    """

    def __init__(self, most_steps: int = 1) -> None:
        self.most_steps = most_steps
        self._batches: PriorityQueue[tuple[Node, ...]] = PriorityQueue(MOST_PASSED)

    def __bool__(self) -> bool:
        return bool(self._batches)

    def put(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Steps of one tree, and speculative children below them, wait from now on."""
        if nodes:
            self._batches.put(tuple(nodes), priority)

    def take(self) -> tuple[Node, ...]:
        """The steps of the next turn; none if nothing waits."""
        taken: list[Node] = []
        for batch in list(self._batches):
            if taken and len(taken) + len(batch) > self.most_steps:
                break
            taken += self._batches.take()
        return tuple(taken)

    def release(self, nodes: Sequence[Node]) -> None:
        """Forget batches that nobody waits for when these nodes are gone, and speculative ones."""
        gone = frozenset(nodes)
        self._batches.change(lambda batch: next(iter(without([batch], gone)), None))

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()


def without(batches: Sequence[tuple[Node, ...]], gone: Collection[Node]) -> list[tuple[Node, ...]]:
    """The batches that somebody waits for when these nodes are gone, without those that are."""
    left = [tuple(node for node in batch if node not in gone) for batch in batches]
    return [batch for batch in left if any(not node.speculative for node in batch)]
