"""A search that has ended, without its text: lineages, counts of tokens, stops, states, scores.

What `solve --record-tree` writes and `simulate` replays, or makes up.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

from beamwright.tree.node import NodeState, StopReason

_Count = Annotated[int, Strict(), Field(ge=0)]
_Tokens = Annotated[int, Strict(), Field(ge=1)]
_Score = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_WHOLE = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_WHOLE)
class RecordedNode:
    """A decoded step.

    lineage: child ordinals from the root, the problem id left out. tokens: of this step.
    """

    lineage: Annotated[tuple[_Count, ...], Field(min_length=1)]
    tokens: _Tokens
    stop: StopReason
    state: NodeState
    score: _Score | None

    @property
    def round(self) -> int:
        """The round in which the node was opened; the first is 1. It is the node's depth."""
        return len(self.lineage)


@dataclass(frozen=True, config=_WHOLE)
class RecordedTree:
    """The search. `nodes` are in lineage order; the root is the prompt.

    prompt_tokens: tokens of the prompt. rounds: how many rounds the search took.
    """

    problem_id: Annotated[int, Strict()] | Annotated[str, Strict()]
    prompt_tokens: _Tokens
    rounds: _Count
    nodes: tuple[RecordedNode, ...]

    def starts(self) -> dict[tuple[int, ...], int]:
        """Tokens of the path before each step, by lineage."""
        ends: dict[tuple[int, ...], int] = {(): self.prompt_tokens}
        found: dict[tuple[int, ...], int] = {}
        for node in self.nodes:
            found[node.lineage] = ends[node.lineage[:-1]]
            ends[node.lineage] = found[node.lineage] + node.tokens
        return found

    @property
    def longest(self) -> int:
        """Tokens of its longest path."""
        starts = self.starts()
        ends = (starts[node.lineage] + node.tokens for node in self.nodes)
        return max(ends, default=self.prompt_tokens)
