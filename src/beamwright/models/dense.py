"""Beamwright's own decoder: one forward pass for all dense families, such as Llama and Gemma.

The fields of `ModelShape` select what differs between families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.kernels import why_no_kernels
from beamwright.attention.protocols import AttentionView
from beamwright.models.decoder import (
    ROW_MULTIPLE,
    Decoder,
    Linear,
    RotaryTables,
    apply_in_tiles,
    apply_padded,
)
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.native import CLibraryLayers, is_native
from beamwright.models.shape import ModelShape
from beamwright.models.weight_homes import HostTable


@dataclass
class Norm:
    """RMS norm or layer norm over the last dimension.

    kind: "rms" or "layer".
    unit_offset: True if 1 has to be added to the stored weights. Such a norm computes in at least
        float32.
    """

    kind: str
    eps: float
    weight: Tensor
    bias: Tensor | None = None
    unit_offset: bool = False

    @cached_property
    def wide(self) -> Tensor:
        """The factor of each column, in at least float32."""
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return 1 + wide if self.unit_offset else wide

    def __call__(self, x: Tensor) -> Tensor:
        if self.unit_offset:
            wide = x.to(self.wide.dtype)
            return F.rms_norm(wide, self.weight.shape, self.wide, self.eps).to(x.dtype)
        if self.kind == "rms":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass
class Layer:
    """Weights of one layer. `qkv` is one fused projection, and so is `gate_up` in a gated MLP."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The projections, which hold nearly all of the layer's bytes."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass
class DecoderWeights:
    """All weights of a decoder.

    embedding: the table [vocab, hidden], a reader of its rows in the checkpoint file, or the table
        in host memory.
    lm_head: the LM head; if it is tied, its weight is the embedding.
    positions: OPT's table of learned positions; None for rotary positions.
    """

    embedding: Tensor | RowReader | HostTable
    layers: list[Layer]
    lm_head: Linear
    final_norm: Norm
    positions: Tensor | None = None


def _kernel_keys(layer: Layer) -> tuple[object, ...]:
    """Return the `Linear.kernel_key` of each projection in a layer."""
    return tuple(each.kernel_key for each in layer.projections)


# Rows that an MLP computes at once on a CPU. An MLP's intermediate rows are about ten times as wide
# as the hidden size, so all rows at once would set the peak of memory.
_INNER_ROWS = 512
_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def fused_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module `models.layer_kernels` if its kernels run on such tensors.

    None: the caller uses torch's operations, which compute the same.
    """
    if device.type != "cuda" or why_no_kernels(device, dtype) is not None:
        return None
    from beamwright.models import layer_kernels  # noqa: PLC0415 (loads Triton)

    return layer_kernels


class DenseDecoder(Decoder):
    """A `Decoder` with the same code for all families: layers of attention and an MLP.

    FLOPs per token: 2 * parameters, plus 4 * layers * heads * head_dim * visible tokens.
    kernels: False to use no Triton kernels (`--attention reference`).
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: DecoderWeights,
        tile_rows: int | None = None,
        *,
        kernels: bool = True,
    ) -> None:
        self.shape = shape
        self.weights = weights
        self._numbers: Sequence[int] = range(shape.layers)  # numbers that `offload` knows layers by
        self.dtype, self.device = weights.final_norm.weight.dtype, weights.final_norm.weight.device
        self.tile_rows, self.least_rows = tile_rows, ROW_MULTIPLE
        self._activate = _ACTIVATE[shape.activation]
        fuses = kernels and not shape.unit_offset and not shape.after_norms and not shape.local_freq
        self._fused = fused_kernels(self.device, self.dtype) if fuses else None
        self._native = self._make_native_layers()
        self._far, self._near = (
            (None, None) if self._native else self._make_rotary_tables(self.dtype)
        )
        self._tile = (
            None if all(each.is_batch_invariant for each in self._projections()) else tile_rows
        )

    @property
    def is_exact_for_one_row(self) -> bool:
        # With 8-bit KV, keys are also rotated, by a product that `_projections` does not contain.
        plain = self.kv_dtype == "auto"
        return plain and all(product.is_exact_for_one_row for product in self._projections())

    @property
    def is_batch_invariant(self) -> bool:
        plain = self._native is not None and self.kv_dtype == "auto"
        return plain and all(product.is_batch_invariant for product in self._projections())

    def forward(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None
    ) -> Tensor:
        """Compute the forward pass, see `Decoder`.

        For tokens that are not in `read`, the last layer computes only keys and values.
        """
        with self.begin_pass() as begin_layer:
            return self._forward(token_ids, positions, view, read, begin_layer)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        view: AttentionView,
        read: Tensor | None,
        begin_layer: Callable[[int], None],
    ) -> Tensor:
        weights, shape = self.weights, self.shape
        x = weights.embedding[token_ids]
        if shape.embed_scale != 1.0:
            # The scale is rounded to the dtype of x, as in training.
            x = x * x.new_tensor(shape.embed_scale)
        if weights.positions is not None:
            x = x + F.embedding(positions + (shape.learned_positions or 0), weights.positions)
        rotary = self._rotary_args(positions) if self._native is None or view.looks_ahead else ()
        if self._native is not None:
            foresee = partial(self._announce_query, view, rotary) if view.looks_ahead else None
            begin = None if self.offload is None else partial(self._begin_layer, begin_layer)
            return self._native.forward(x, positions, view, read, foresee, begin)
        # A layer has two halves, attention and MLP. Each ends with the norm of the next half, so
        # that one pass over the rows adds to the residual stream and normalises.
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        normed = self._apply_in_tiles(partial(self._add_norm, norms[0]), x)[1]
        for number, layer in enumerate(weights.layers):
            self._begin_layer(begin_layer, number)
            if view.looks_ahead:
                self._announce_query(view, rotary, number, x)
            own = self._layer_rotary_args(number, rotary)
            query, key_value = self._apply_in_tiles(partial(self._project, layer), normed, *own)
            del normed  # free its memory before attention
            context: Tensor = view.attend(number, query, key_value)
            if read is not None and number == len(weights.layers) - 1:
                x, context = x.index_select(0, read), context.index_select(0, read)
            after = partial(self._finish_block, layer, norms[number + 1])
            x, normed = self._apply_in_tiles(after, x, context)
        return normed

    def _begin_layer(self, begin_layer: Callable[[int], None], number: int) -> None:
        begin_layer(self._numbers[number])

    def logits(self, hidden: Tensor) -> Tensor:
        return apply_padded(self.weights.lm_head, hidden, self._tile, self.least_rows)

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self.weights.embedding[token_ids]

    @property
    def self_test_key(self) -> tuple[object, ...]:
        """Key of self-test results, equal for models whose passes run the same kernels.

        It holds the sizes of a layer, the kernels of the projections, dtype, device, rows per tile
        and KV dtype. The number of layers and the values of weights do not matter.
        """
        forms = {_kernel_keys(layer) for layer in self.weights.layers}
        head = self.weights.lm_head.kernel_key if self.shape.has_lm_head else ()
        shape, how = replace(self.shape, layers=1), (self.dtype, self.device, self.tile_rows)
        return shape, frozenset(forms), head, *how, self.kv_dtype

    def first_layers(self) -> DenseDecoder:
        shape, layers = self.shape, self.weights.layers
        firsts = dict[object, int]()
        for place, group in enumerate(shape.kv_layer_groups):
            for number in group.layers:
                kind = place, number in shape.local_layers, _kernel_keys(layers[number])
                firsts.setdefault(kind, number)
        kept = sorted(firsts.values())
        groups = [
            replace(g, layers=tuple(kept.index(n) for n in g.layers if n in kept))
            for g in shape.groups
        ]
        near = tuple(kept.index(n) for n in shape.local_layers if n in kept)
        shape = replace(shape, layers=len(kept), groups=tuple(groups), local_layers=near)
        first = copy(self)  # shares the rotary tables
        first.shape = shape
        first.weights = replace(self.weights, layers=[layers[number] for number in kept])
        first._numbers = [self._numbers[number] for number in kept]
        first._native = first._make_native_layers()
        return first

    def _make_native_layers(self) -> CLibraryLayers | None:
        if self.device.type != "cpu" or not is_native(self.shape, self.weights):
            return None
        return CLibraryLayers(
            self.shape, self.weights, *self._make_rotary_tables(torch.float32, whole=False)
        )

    def _make_rotary_tables(
        self, dtype: torch.dtype, *, whole: bool = True
    ) -> tuple[RotaryTables | None, RotaryTables | None]:
        """Return the rotary tables of most layers, and those of `shape.local_layers`.

        The first is None without rotary positions, the second without local layers.
        whole: compute the tables for the whole context at once, as captured CUDA graphs need it.
        """
        shape, how = self.shape, (self.shape.context, dtype, self.device)
        make = partial(RotaryTables, num_positions=shape.context if whole else 0)
        far = make(shape.inv_freq, shape.rope_scale, *how) if shape.inv_freq else None
        return far, make(shape.local_freq, 1.0, *how) if shape.local_freq else None

    def _rotary_args(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary arguments of `_project`: for most layers, then for local ones.

        `_layer_rotary_args` selects the arguments of one layer.
        """
        # The C library has its own tables. With it, torch tables are made only for views that look
        # ahead.
        if self._far is None and self.shape.inv_freq:
            self._far, self._near = self._make_rotary_tables(self.dtype)
        if self._far is None:
            return ()
        if self._fused is not None:
            return (positions,)
        near = () if self._near is None else self._near.rows(positions)
        return *self._far.rows(positions), *near

    def _projections(self) -> Iterator[Linear]:
        """Yield the projections of all layers, then the LM head, which a verifier may not have."""
        for layer in self.weights.layers:
            yield from layer.projections
        if self.shape.has_lm_head:
            yield self.weights.lm_head

    def _apply_in_tiles(
        self, work: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return apply_in_tiles(self._tile, work, *tensors)

    def _announce_query(
        self, view: AttentionView, rotary: tuple[Tensor, ...], number: int, x: Tensor
    ) -> None:
        """Estimate the query of layer `number` + 1, and pass it to the view.

        The estimate is computed from x, the input of layer `number`. From the estimate the view
        chooses the KV blocks to load.
        """
        if number + 1 < len(self.weights.layers):
            coming = partial(self._estimate_query, self.weights.layers[number + 1])
            own = self._layer_rotary_args(number + 1, rotary)
            view.foresee(number + 1, self._apply_in_tiles(coming, x.to(self.dtype), *own)[0])

    def _layer_rotary_args(self, number: int, rotary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Select the rotary arguments of layer `number` from those that `_rotary_args` returned."""
        if self._near is None:
            return rotary
        return rotary[2:] if number in self.shape.local_layers else rotary[:2]

    def _estimate_query(self, layer: Layer, x: Tensor, *rotary: Tensor) -> tuple[Tensor, Tensor]:
        return self._project(layer, self._add_norm(layer.attention_norm, x)[1], *rotary)

    def _project(self, layer: Layer, normed: Tensor, *rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Compute query [rows, heads, head_dim], and key and value [rows, 2, kv_heads, head_dim].

        Both are slices of one tensor. Code that stores keys and values must copy them, or it keeps
        the memory of the query.
        rotary: positions [rows] for the kernels, otherwise cos and sin [rows, 1, head_dim].
        """
        shape = self.shape
        heads = layer.qkv(normed).view(len(normed), -1, shape.head_dim)
        self._rotate_heads(layer, heads, *rotary)
        key_value = heads[:, shape.heads :].unflatten(1, (2, shape.kv_heads))
        return heads[:, : shape.heads], key_value

    def _rotate_heads(self, layer: Layer, heads: Tensor, *rotary: Tensor) -> None:
        """Normalise and rotate queries and keys in place.

        heads: [rows, heads, head_dim]: queries, keys, then values, which do not change.
        """
        shape = self.shape
        if rotary and self._fused is not None:
            assert self._far is not None
            sizes, tables = (shape.heads, shape.kv_heads), (self._far.cos, self._far.sin)
            self._fused.rotate(heads, *sizes, *rotary, *tables, layer.query_norm, layer.key_norm)
            return
        queries_keys = normed = heads[:, : shape.heads + shape.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = layer.query_norm(queries_keys[:, : shape.heads])
            key = layer.key_norm(queries_keys[:, shape.heads :])
            normed = torch.cat([query, key], dim=1)
        if rotary:
            cos, sin = rotary
            swapped = normed.roll(shape.head_dim // 2, dims=-1)
            torch.addcmul(normed * cos, swapped, sin, out=queries_keys)
        elif normed is not queries_keys:
            queries_keys.copy_(normed)

    def _finish_block(
        self, layer: Layer, follow: Norm, x: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the rest of a layer after attention: output projection and MLP.

        Return the residual stream [rows, hidden], and the stream after the next norm, `follow`.
        """
        product = layer.out if self._fused is None else layer.out.partial_sums
        delta = product(context.flatten(1))
        if layer.after_attention is not None:
            delta = layer.after_attention(delta)
        if len(x) > _INNER_ROWS and x.device.type == "cpu":
            x = x + delta
            for rows in x.split(_INNER_ROWS):
                rows.add_(self._mlp_output(layer, layer.mlp_norm(rows)))
            return x, follow(x)
        x, normed = self._add_norm(layer.mlp_norm, x, delta)
        return self._add_norm(follow, x, self._mlp_output(layer, normed))

    def _mlp_output(self, layer: Layer, normed: Tensor) -> Tensor:
        """Compute the output of an MLP [rows, hidden], to be added to the residual stream.

        The output may be partial sums [parts, rows, hidden], which the next norm's kernel adds up.
        """
        delta = self._run_mlp(layer, normed)
        return delta if layer.after_mlp is None else layer.after_mlp(delta)

    def _run_mlp(self, layer: Layer, normed: Tensor) -> Tensor:
        kind = self.shape.activation
        if self.shape.gated and self._fused is not None and kind in self._fused.GATED:
            opened = layer.gate_up.gated(normed, kind)
            if opened is None:
                opened = self._fused.gated(layer.gate_up(normed), kind)
            return layer.down.partial_sums(opened)
        inner = layer.gate_up(normed)
        if not self.shape.gated:
            return layer.down(self._activate(inner))
        gate, up = inner.chunk(2, dim=-1)
        return layer.down(self._activate(gate).mul_(up))

    def _add_norm(
        self, norm: Norm, x: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta, and x + delta after `norm`. The fused kernel adds to x in place."""
        if self._fused is not None:
            return x, self._fused.add_norm(x, delta, norm)
        x = x if delta is None else x + delta
        return x, norm(x)
