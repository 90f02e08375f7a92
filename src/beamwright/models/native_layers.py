"""Layers of the own decoder by the library in C, with nothing of Python or torch between products.

Where a view says what there is to attend to, a whole step is one call; else attention is called
between two of them. Everything is in float32 but keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from beamwright.attention.native import run
from beamwright.attention.protocols import AttentionView, DecodeView
from beamwright.library import LANES, Model, NativeLayer, Pass
from beamwright.models.angles import Angles
from beamwright.models.native import NativeLinear
from beamwright.models.shape import ModelShape

_ACTIVATIONS = ("silu", "gelu_tanh", "relu")
_STAGES = 3  # of a layer: queries, keys and values; attention; the rest
_PRODUCTS = ("qkv", "out", "gate_up", "down")


def is_native(shape: ModelShape, weights: Any) -> bool:
    """Whether the library runs these layers."""
    known = shape.norm == "rms" and shape.gated and shape.activation in _ACTIVATIONS
    products = (getattr(layer, name) for layer in weights.layers for name in _PRODUCTS)
    widths = shape.hidden % LANES == shape.head_dim % LANES == 0
    return known and widths and all(isinstance(each, NativeLinear) for each in products)


class NativeLayers:
    """weights: of `dense`, for which `is_native`. far, near: rotary tables in float32; near: of
    layers `shape.near`."""

    def __init__(
        self, shape: ModelShape, weights: Any, far: Angles | None, near: Angles | None
    ) -> None:
        self._shape, self._kept = shape, [weights]
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        groups = {
            number: (group, place)
            for group, of_group in enumerate(shape.kv_groups)
            for place, number in enumerate(of_group.layers)
        }
        self._layers = (NativeLayer * shape.layers)()
        for number, (native, layer) in enumerate(zip(self._layers, weights.layers, strict=True)):
            for name in _PRODUCTS:
                setattr(native, name, getattr(layer, name).projection)
            for name in ("query_norm", "key_norm", "after_attention", "after_mlp"):
                setattr(native, name, self._place(getattr(layer, name)))
            native.norm, native.follow = map(self._place, (layer.mlp_norm, norms[number + 1]))
            native.group, native.place = groups[number]
        self._kept.append(norms)
        self._turning = Lock()
        self._angles = [(far, {*range(shape.layers)} - {*shape.near}), (near, shape.near)]
        self._model = Model(
            self._layers,
            self._place(norms[0]),
            *(shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate),
            *(_ACTIVATIONS.index(shape.activation), shape.norm_eps),
        )

    def _place(self, norm: Any) -> int | None:
        if norm is None:
            return None
        self._kept.append(norm.wide)
        place: int = norm.wide.data_ptr()
        return place

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        view: AttentionView,
        read: Tensor | None,
        foresee: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Final-normalised rows of x [rows, hidden], float32; see `Decoder.hidden`.

        foresee: told before a layer what goes into it, its number and x [rows, hidden].
        """
        shape, dtype, last = self._shape, x.dtype, _STAGES * self._shape.layers
        self._turn_by(positions)
        rows = self._rows(x, positions)
        described = view.described() if isinstance(view, DecodeView) and read is None else None
        if described is not None:
            self._run(rows, 0, last, described)
            return rows["normed"].to(dtype)
        self._run(rows, 0, 1)
        for number in range(shape.layers):
            if foresee is not None:
                foresee(number, rows["x"])
            heads = rows["turned"].to(dtype)
            key_value = heads[:, shape.heads :].unflatten(1, (2, shape.kv_heads))
            context = view.attend(number, heads[:, : shape.heads], key_value).float().contiguous()
            if read is not None and number == shape.layers - 1:
                rows = self._rows(rows["x"].index_select(0, read), positions)
                context = context.index_select(0, read)
            rows["context"] = context
            rows["turned"] = torch.empty_like(rows["turned"])  # a view may keep what it was given
            first = _STAGES * number + 2
            self._run(rows, first, min(first + 2, last))
        return rows["normed"].to(dtype)

    def _turn_by(self, positions: Tensor) -> None:
        """Grow the tables for these positions; another thread may still read older ones."""
        last = int(positions.max()) if len(positions) else -1
        with self._turning:
            for angles, numbers in self._angles:
                if angles is not None and angles.reach(last):
                    self._kept.append((angles.cos, angles.sin))
                    for layer in (self._layers[number] for number in numbers):
                        layer.cos, layer.sin = angles.cos.data_ptr(), angles.sin.data_ptr()

    def _rows(self, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
        shape, count = self._shape, len(x)
        heads, width = shape.heads + 2 * shape.kv_heads, shape.head_dim
        return {
            "x": x.to(torch.float32, copy=True, memory_format=torch.contiguous_format),
            "normed": torch.empty(count, shape.hidden),
            "turned": torch.empty(count, heads, width),
            "context": torch.empty(count, shape.heads, width),
            "positions": positions.long().contiguous(),
        }

    def _run(
        self, rows: dict[str, Tensor], begin: int, end: int, attentions: Sequence[Any] = ()
    ) -> None:
        places = {name: tensor.data_ptr() for name, tensor in rows.items()}
        run(self._model, Pass(begin, end, len(rows["x"]), **places), attentions)
