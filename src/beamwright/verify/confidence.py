"""Scores that need no second model: the generator's own log-probabilities, or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from beamwright.tree import Node


class LogprobVerifier:
    """A step's score is the geometric mean of its tokens' probabilities, in (0, 1]."""

    default_aggregate = "mean"

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """See `protocols.Verifier`."""
        return [
            math.exp(sum(node.logprobs) / len(node.logprobs)) if node.logprobs else None
            for node in nodes
        ]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


class NoVerifier:
    """No opinion: every score is None, and order falls back to lineage."""

    default_aggregate = "last"

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """See `protocols.Verifier`."""
        return [None for _ in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""
