"""Keys and values that enter 8 bits: rounded once, before anything has seen them.

Keys are turned by a Hadamard matrix first, and queries by the same, so that products stay: in a few
dimensions keys are many times as large as in others, and those would set the scale of all. A
decoded token, a prefilled one, tails and sealed segments are then read as the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from beamwright.attention.protocols import AttentionView
from beamwright.kv.codes import hadamard, rounded
from beamwright.models.shape import ModelShape
from beamwright.sections import KVDtype

Turns = Mapping[int, tuple[Tensor, float]]
"""By head_dim: the matrix, and what a product of two vectors that went through it is to be
multiplied by."""
ByRows = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def turns_of(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Turns:
    """For every kind of heads."""
    made = {group.head_dim: hadamard(group.head_dim) for group in shape.kv_groups}
    return {size: (matrix.to(device, dtype), part) for size, (matrix, part) in made.items()}


class RoundedView(AttentionView):
    """An attention view that gets keys and values as they will be read.

    kept: see `kv.codes`. by_rows: of the decoder that it is for.
    """

    def __init__(self, view: AttentionView, kept: KVDtype, turns: Turns, by_rows: ByRows) -> None:
        self._view, self._kept, self._turns, self._by_rows = view, kept, turns, by_rows
        self.looks_ahead, self.states = view.looks_ahead, view.states

    def foresee(self, layer: int, query: Tensor) -> None:
        """A query as `attend` will get it."""
        self._view.foresee(layer, self._asking(query))

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        both = torch.stack([self.turned(key_value[:, 0]), key_value[:, 1]], dim=1)
        fresh = rounded(both, self._kept)
        context: Tensor = self._view.attend(layer, self._asking(query), fresh, sinks)
        return context

    def close(self) -> None:
        self._view.close()

    def turned(self, vectors: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim], so that what is large in them is spread."""
        matrix, _ = self._turns[vectors.shape[-1]]
        flat = vectors.reshape(len(vectors), -1)  # a product's tile is of tokens, as everywhere
        turned = self._by_rows(lambda x: (x.reshape(-1, len(matrix)) @ matrix).view(x.shape), flat)
        return turned.view(vectors.shape)

    def _asking(self, query: Tensor) -> Tensor:
        """Turned queries whose products with turned keys are those of the plain ones."""
        return self.turned(query) * self._turns[query.shape[-1]][1]
