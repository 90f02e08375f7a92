"""A decoder whose keys and values enter 8 bits: rounded once, before anything has seen them.

Keys are turned by a Hadamard matrix first, and queries by the same, so that products stay: in a few
dimensions keys are many times as large as in others, and those would set the scale of all. A
decoded token, a prefilled one, tails and sealed segments are then read as the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beamwright.attention.protocols import AttentionView
from beamwright.kv.codes import hadamard, rounded
from beamwright.models.decoder import Decoder
from beamwright.models.recurrent import RowStates
from beamwright.sections import KVDtype


class RoundingDecoder(Decoder):
    """A decoder, with what it hands to its view as `kv.codes` keep it."""

    def __init__(self, inner: Decoder, kv_dtype: KVDtype) -> None:
        self.inner, self.kv_dtype = inner, kv_dtype
        self.shape, self.tile_rows = inner.shape, inner.tile_rows
        self.dtype, self.device = inner.dtype, inner.device
        sizes = {group.head_dim for group in inner.shape.kv_groups}
        made = {size: hadamard(size) for size in sizes}
        self._turns = {
            size: (matrix.to(inner.device, inner.dtype), part)
            for size, (matrix, part) in made.items()
        }

    @property
    def least_rows(self) -> int:
        return self.inner.least_rows

    @least_rows.setter
    def least_rows(self, value: int) -> None:
        self.inner.least_rows = value

    @property
    def steps_in_place(self) -> bool:
        return self.inner.steps_in_place

    @property
    def kind(self) -> tuple[object, ...]:
        return *self.inner.kind, self.kv_dtype

    def hidden(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None = None
    ) -> Tensor:
        return self.inner.hidden(token_ids, positions, _RoundedView(view, self), read)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def embedded(self, token_ids: Tensor) -> Tensor:
        return self.inner.embedded(token_ids)

    def first_layers(self) -> Decoder:
        return RoundingDecoder(self.inner.first_layers(), self.kv_dtype)

    def turned(self, vectors: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim], so that what is large in them is spread."""
        matrix, _ = self._turns[vectors.shape[-1]]
        flat = vectors.reshape(len(vectors), -1)  # a product's tile is of tokens, as everywhere
        turned = self.by_rows(lambda x: (x.reshape(-1, len(matrix)) @ matrix).view(x.shape), flat)
        return turned.view(vectors.shape)

    def asking(self, query: Tensor) -> Tensor:
        """Turned queries whose products with turned keys are those of the plain ones."""
        return self.turned(query) * self._turns[query.shape[-1]][1]


class _RoundedView:
    """An attention view that gets keys and values as they will be read."""

    def __init__(self, view: AttentionView, by: RoundingDecoder) -> None:
        self._view, self._by = view, by

    @property
    def looks_ahead(self) -> bool:
        """See `LooksAhead`."""
        return getattr(self._view, "looks_ahead", False)

    @property
    def states(self) -> RowStates | None:
        """Those of recurrent layers, which nothing rounds."""
        return getattr(self._view, "states", None)

    def foresee(self, layer: int, query: Tensor) -> None:
        """A query as `attend` will get it."""
        self._view.foresee(layer, self._by.asking(query))  # type: ignore[attr-defined]

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        turned = torch.stack([self._by.turned(key_value[:, 0]), key_value[:, 1]], dim=1)
        fresh = rounded(turned, self._by.kv_dtype)
        context: Tensor = self._view.attend(layer, self._by.asking(query), fresh, sinks)
        return context

    def close(self) -> None:
        self._view.close()
