"""How long a step will be: exact where steps have a fixed length, else what was seen so far."""

from __future__ import annotations

from beamwright.engine.request import Decodings
from beamwright.engine.stops import RowLimit, row_limit
from beamwright.tree import Node

_FIRST_GUESS = 32
_MARGIN = 1.25


class StepLengths:
    """Expected tokens of a step. A schedule reserves this much; results do not depend on it."""

    def __init__(self, decodings: Decodings, context: int) -> None:
        self.decodings, self._context = decodings, context
        self._num_steps = 0
        self._num_tokens = 0

    def observe(self, num_tokens: int) -> None:
        """A step of this length is complete."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    def limit(self, node: Node) -> RowLimit:
        """The most tokens that this node's step may have, and what stops it there."""
        return row_limit(node, self.decodings.of(node).step, self._context)

    def reserved(self, node: Node, num_tokens: int) -> int:
        """Tokens that a row with so many is given blocks for when it is admitted.

        Rows whose lengths differ do not all end at once: on average they are half-way.
        """
        left = max(1, self.expected(node) - num_tokens)
        return num_tokens + (left if self.exact(node) else -(-left // 2))

    def exact(self, node: Node) -> bool:
        """True if its step has a fixed length, unless its path ends before."""
        return self.decodings.of(node).step.step_tokens is not None

    def expected(self, node: Node) -> int:
        """Tokens that this node's step is expected to have."""
        max_tokens = self.limit(node).tokens
        if self.exact(node):
            return max_tokens
        mean = self._num_tokens / self._num_steps if self._num_steps else _FIRST_GUESS
        return min(max_tokens, int(_MARGIN * mean) + 1)
