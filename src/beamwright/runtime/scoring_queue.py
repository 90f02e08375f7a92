"""ScoringQueue: steps that wait for the verifier, a batch for each tree, in the order they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from beamwright.tree import Node


class ScoringQueue:
    """The verifier's work queue (decoupled tree exploration, Alg. 2).

    A turn takes the oldest batch, and what waits behind it while both fit `most_steps`: thesis,
    7.2, N_PRM. With 1 every tree has turns of its own.
    """

    def __init__(self, most_steps: int = 1) -> None:
        self.most_steps = most_steps
        self._batches: deque[tuple[Node, ...]] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def put(self, nodes: Sequence[Node]) -> None:
        """Steps of one tree, and speculative children below them, wait from now on."""
        if nodes:
            self._batches.append(tuple(nodes))

    def take(self) -> tuple[Node, ...]:
        """The steps of the next turn; none if nothing waits."""
        taken: list[Node] = []
        while self._batches:
            if taken and len(taken) + len(self._batches[0]) > self.most_steps:
                break
            taken += self._batches.popleft()
        return tuple(taken)

    def release(self, nodes: Sequence[Node]) -> None:
        """Forget batches that nobody waits for when these nodes are gone, and speculative ones."""
        self._batches = deque(without(self._batches, nodes))

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()


def without(batches: Sequence[tuple[Node, ...]], nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    """The batches that somebody waits for when these nodes are gone, without those that are."""
    gone = set(nodes)
    left = [tuple(node for node in batch if node not in gone) for batch in batches]
    return [batch for batch in left if any(not node.speculative for node in batch)]
