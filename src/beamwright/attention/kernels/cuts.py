"""Where a path is cut into parts. A pure function of the lengths on one path.

Each part gives one partial result per row, and a row's parts are merged in path order. So the cuts
may depend on the row's own path and on constants, and on nothing else: then its bits are the same
whoever is in the batch (docs/architecture.md, "Sameness").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cuts:
    """The constants.

    part_tokens: most tokens of a part, a multiple of a block: longer segments are split (split-K).
    fresh_tokens: segments that begin in about the last so many tokens of a path are parts of their
        own, because siblings share some and not others. Older ones are joined up to `part_tokens`:
        beams that differ there are few, and a partial of a short segment can be larger than its KV.
    """

    part_tokens: int = 256
    fresh_tokens: int = 256


@dataclass(frozen=True)
class TokenRun:
    """Tokens [first, first + tokens) of the `part`-th segment of a path; `first` starts a block."""

    part: int
    first: int
    tokens: int


def cut_path(visible: Sequence[int], block_tokens: int, cuts: Cuts) -> list[list[TokenRun]]:
    """The parts of a path whose segments show so many tokens; empty segments are left out."""
    length = sum(visible)
    joined_until = length
    if cuts.fresh_tokens:
        # Steps of `part_tokens`, so that beams of about the same length join the same segments.
        joined_until = (length - cuts.fresh_tokens) // cuts.part_tokens * cuts.part_tokens
    most_blocks = cuts.part_tokens // block_tokens
    parts: list[list[TokenRun]] = []
    open_blocks = most_blocks  # nothing to join to
    position = 0
    for number, tokens in enumerate(visible):
        for first in range(0, tokens, cuts.part_tokens):
            run = TokenRun(number, first, min(cuts.part_tokens, tokens - first))
            blocks = -(-run.tokens // block_tokens)
            if position < joined_until and open_blocks + blocks <= most_blocks:
                parts[-1].append(run)
                open_blocks += blocks
            else:
                parts.append([run])
                open_blocks = blocks
        position += tokens
    return parts
