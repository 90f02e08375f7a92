"""Tables of rotary cos and sin that grow with the longest path.

For a whole context they can take 200 MB, of which most searches read little.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RUN = 2048  # positions computed in one call, so that bits do not depend on when tables grow


class Angles:
    """cos, sin: [positions, head_dim]. The first half of sin is negated: a head's halves swap.

    reached: positions that the tables have from the start. Who captures steps asks for the whole
    context, because tables that grow are new tensors.
    """

    def __init__(
        self,
        inv_freq: tuple[float, ...],
        scale: float,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        reached: int = 0,
    ) -> None:
        # float32 angles in every precision but float64: what the checkpoints were trained with.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._freq = torch.tensor(inv_freq, dtype=torch.float32).to(wide)
        self._scale, self._context = scale, context
        self.cos = self.sin = torch.empty(0, 2 * len(inv_freq), dtype=dtype, device=device)
        self._grow(reached)

    def reach(self, last: int) -> bool:
        """Grow the tables to position `last` if they end before it; True if they did."""
        known = len(self.cos)
        if last >= known:
            self._grow(max(last + 1, 2 * known))
        return len(self.cos) > known

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, head_dim] of positions within reach."""
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
