"""cos and sin of rotary positions, made as far as paths reach: a whole context's take megabytes."""

from __future__ import annotations

import torch
from torch import Tensor

_RUN = 2048  # positions that are computed together, whenever that is: their bits stay the same


class Angles:
    """cos, sin: [positions, head_dim]; sin's first half is negated, as halves are swapped.

    whole: all of the context at once, for captured steps: those read tables that never move.
    """

    def __init__(
        self,
        inv_freq: tuple[float, ...],
        scale: float,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        whole: bool = False,
    ) -> None:
        # float32 angles in every precision but float64: what the checkpoints were trained with.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._freq = torch.tensor(inv_freq, dtype=torch.float32).to(wide)
        self._scale, self._context = scale, context
        self.cos = self.sin = torch.empty(0, 2 * len(inv_freq), dtype=dtype, device=device)
        self._whole = whole
        if whole:
            self._grow(context)

    def reach(self, positions: Tensor) -> bool:
        """Have these positions; True if the tables are new ones."""
        known = len(self.cos)
        if self._whole or not len(positions):
            return False
        if (last := int(positions.max())) >= known:
            self._grow(max(last + 1, 2 * known))
        return len(self.cos) > known

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, head_dim]."""
        self.reach(positions)
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def _grow(self, count: int) -> None:
        tables = [(self.cos, self.sin)]
        for first in range(len(self.cos), min(count, self._context), _RUN):
            run = torch.arange(first, min(first + _RUN, self._context)).to(self._freq.dtype)
            angles = torch.outer(run, self._freq)
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
            both = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
            tables.append((both[0].to(self.cos), both[1].to(self.sin)))
        self.cos, self.sin = map(torch.cat, zip(*tables, strict=True))
