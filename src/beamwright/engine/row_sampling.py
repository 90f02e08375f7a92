"""How each row of a batch draws its tokens: rows of one batch may differ in everything.

What a step reads is in tensors that are never moved, so that a captured step can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from beamwright.sections import SamplingSettings


class Ways(NamedTuple):
    """What at least one row does; what nobody does is not computed.

    likeliest: how many tokens top-k has to rank for the row that asks for most, 0 for none.
    """

    draws: bool
    is_greedy: bool
    likeliest: int
    top_p: bool
    min_p: bool

    @property
    def filters(self) -> bool:
        """Some row draws from fewer than all tokens."""
        return bool(self.likeliest or self.top_p or self.min_p)


class RowSampling:
    """Parameters of each row: `greedy` [rows], the others [rows, 1].

    A filter that a row does not use has a value that leaves all its tokens in, to the last bit.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.greedy = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.top_k = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self._numbers = torch.ones(3, num_rows, 1, device=device)
        self.temperature, self.top_p, self.min_p = self._numbers
        self.ways = Ways(True, False, 0, False, False)

    @classmethod
    def of(cls, rows: Sequence[SamplingSettings], device: torch.device) -> RowSampling:
        """Of rows with these settings."""
        made = cls(len(rows), device)
        made.load(rows, [False] * len(rows))
        return made

    def load(self, rows: Sequence[SamplingSettings], greedy: Sequence[bool]) -> None:
        """Go on with these settings. greedy: the likeliest tokens are taken whatever they say."""
        likeliest = [own or each.temperature == 0 for each, own in zip(rows, greedy, strict=True)]
        drawing = [row for row, own in zip(rows, likeliest, strict=True) if not own]
        top_k = max((row.top_k or 0 for row in drawing), default=0)
        self.ways = Ways(
            draws=bool(drawing),
            is_greedy=any(likeliest),
            # Of all numbers a few, so that a step is captured a few times at most.
            likeliest=1 << (top_k - 1).bit_length() if top_k else 0,
            top_p=any(row.top_p < 1.0 for row in drawing),
            min_p=any(row.min_p is not None for row in drawing),
        )
        numbers = [
            [row.temperature or 1.0 for row in rows],
            # Sums of probabilities may come out above 1.
            [row.top_p if row.top_p < 1.0 else torch.inf for row in rows],
            [row.min_p or 0.0 for row in rows],
        ]
        self.greedy.copy_(torch.tensor(likeliest))
        self.top_k.copy_(torch.tensor([row.top_k or 0 for row in rows]).unsqueeze(1))
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float32).unsqueeze(2))

    @property
    def filters(self) -> torch.Tensor:
        """Rows that draw from fewer than all tokens [rows]."""
        filters = (self.top_k > 0) | (self.top_p < torch.inf) | (self.min_p > 0)
        found: torch.Tensor = filters.squeeze(1) & ~self.greedy
        return found

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a draw reads, the rows first."""
        return self.greedy, self.temperature, self.top_k, self.top_p, self.min_p
