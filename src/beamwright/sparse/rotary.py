"""Rotary positions on queries that are no longer, or not yet, at a token of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """Tables [context, head_dim] of a decoder, whose `sin` is negated in its first half; empty
    where positions are learned, and nothing is turned."""

    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim] at positions [rows]."""
        return self._turned(values, positions, 1.0)

    def turn_back(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `turn` makes these of."""
        if not self.cos.numel():
            return values
        scale = (self.cos[0] ** 2 + self.sin[0] ** 2)[0]
        return self._turned(values, positions, -1.0) / scale

    def _turned(self, values: torch.Tensor, positions: torch.Tensor, sign: float) -> torch.Tensor:
        if not self.cos.numel():
            return values
        # Rows that have stopped go on until others do, inside the context, as in the decoder.
        positions = positions.clamp(max=len(self.cos) - 1)
        cos, sin = self.cos[positions].unsqueeze(1), sign * self.sin[positions].unsqueeze(1)
        return values * cos + values.roll(values.shape[-1] // 2, -1) * sin
