"""CPU matrix products with quantised weights, by the C library that is built from `csrc/`.

The library multiplies the blocks of GGUF files, 4-bit codes with a scale per group of columns
(`GroupedLinear`), and weights that were rounded to 8 bits here, in blocks of GGUF's Q8_0. It rounds
activations to 8 bits with a scale per 32 columns. Results are bitwise independent of the batch, the
number of threads and the CPU, because `csrc/products.c` fixes the order of sums. Without the
library, weights are dequantised for each product.

`CLibraryLayers` runs all layers of Beamwright's own decoder without Python or torch in between. If
the attention view can describe its work as data (`DecodeView.describe_layers`), one call computes a
token of every row. Otherwise Python calls the view in the middle of each layer. All tensors are
float32 except keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from beamwright.attention.native import run_in_library
from beamwright.attention.protocols import AttentionView, DecodeView
from beamwright.errors import NotFiniteError
from beamwright.library import (
    LANES,
    Model,
    NativeLayer,
    NativePart,
    Pass,
    Projection,
    instruction_set,
    library,
)
from beamwright.models.decoder import Linear, RotaryTables
from beamwright.models.formats.gguf import BlockLinear
from beamwright.models.grouped import GroupedLinear, JoinedLinear, join_projections
from beamwright.models.shape import ModelShape

_TILE = 16  # outputs per tile
_NOT_FINITE = -2
_GROUPS = {(4, 32): 48, (4, 64): 49, (4, 128): 50}  # (bits, group columns) to the library's kind
_BYTES, _BYTES_COLUMNS, _BYTE_MOST = 8, 32, 127  # Q8_0: type, columns of a block, largest code
_BLOCK_VALUES = 1 << 20  # values rounded at once, which bounds the float32 copies
_ACTIVATIONS = ("silu", "gelu_tanh", "relu")
_STAGES = 3  # stages of a layer: queries, keys and values; attention; the rest
_PRODUCTS = ("qkv", "out", "gate_up", "down")

Codes = BlockLinear | GroupedLinear


def library_accepts(dtype: torch.dtype) -> bool:
    """Return whether the C library exists and accepts activations of this dtype."""
    return library() is not None and dtype != torch.float64


class NativeLinear(Linear):
    """Quantised projections of one input, which the C library multiplies in one call.

    Their outputs are concatenated.

    parts: (kind, outputs, tiles) of each projection: the library's number of the weight format, the
        number of outputs, and the weights in the library's order.
    chosen: the instruction set to use; None for the best one of this CPU.
    """

    is_exact_for_one_row = True
    is_batch_invariant = True

    def __init__(self, codes: Sequence[Codes], chosen: int | None = None) -> None:
        self.parts = [(_kind(each), len(each.weight), _tiles(each)) for each in codes]
        biases = [each.bias for each in codes if each.bias is not None]
        super().__init__(self.parts[0][2], torch.cat(biases).float() if biases else None)
        given = [NativePart(kind, outputs, tiles.data_ptr()) for kind, outputs, tiles in self.parts]
        sizes = len(given), codes[0].columns, sum(outs for _, outs, _ in self.parts)
        # Copies of `projection`, in a model's layers, point to this array as well.
        self._given = (NativePart * len(given))(*given)
        self.projection = Projection(self._given, *sizes)
        self._place_bias()
        self._set = instruction_set() if chosen is None else chosen

    @property
    def kernel_key(self) -> tuple[object, ...]:
        return type(self), *(kind for kind, _, _ in self.parts)

    @property
    def stored(self) -> list[Tensor]:
        return [tiles for *_, tiles in self.parts]

    def place_stored(self, tensors: Sequence[Tensor]) -> None:
        self.parts = [(*part[:2], tiles) for part, tiles in zip(self.parts, tensors, strict=True)]
        self.weight = tensors[0]
        for native, tiles in zip(self._given, tensors, strict=True):
            native.tiles = tiles.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, columns]; return [rows, outputs] in x's dtype.

        Raises:
            MemoryError: if the library cannot allocate a copy of x in 8 bits.
        """
        wide = x.float() if x.dtype == torch.float16 else x
        wide = wide.contiguous()
        self._place_bias()
        product = wide.new_empty(len(x), self.projection.outputs)
        failed = library().bw_multiply(
            *(self.projection, wide.data_ptr(), wide.dtype == torch.bfloat16, len(x)),
            *(product.data_ptr(), torch.get_num_threads(), self._set),
        )
        if failed:
            raise MemoryError
        return product.to(x.dtype)

    def _place_bias(self) -> None:
        """Pass the bias's address to the library; `transformers` may have replaced the bias."""
        if self.bias is not None:
            self.bias = self.bias.float()
            self.projection.bias = self.bias.data_ptr()


def _kind(linear: Linear) -> int:
    """Return the library's number of the weight format; -1 for an unsupported format."""
    if isinstance(linear, GroupedLinear):
        return _GROUPS.get((linear.bits, linear.group), -1)
    return linear.kind if isinstance(linear, BlockLinear) else -1


def _tiles(codes: Codes) -> Tensor:
    """Return the weights in the library's tile order, uint8.

    Raises:
        NotFiniteError: if a scale is NaN or infinite.
    """
    outputs, rows, kind = len(codes.weight), codes.weight.contiguous(), _kind(codes)
    size = library().bw_tile_bytes(kind, codes.columns)
    tiles = torch.empty(-(-outputs // _TILE) * size, dtype=torch.uint8)
    given = kind, rows.data_ptr(), outputs, codes.columns
    if library().bw_pack(*given, tiles.data_ptr(), torch.get_num_threads()) == _NOT_FINITE:
        what = codes.what if isinstance(codes, BlockLinear) else "a weight"
        raise NotFiniteError(f"{what} holds NaN or infinite scales: the file is damaged")
    return tiles


def can_multiply(linear: Linear) -> bool:
    """Return whether the library can multiply this projection."""
    if library() is None or not isinstance(linear, Codes):
        return False
    return bool(library().bw_tile_bytes(_kind(linear), linear.columns))


def pack_for_library(linear: Linear) -> Linear:
    """Convert a quantised projection to `NativeLinear`; unsupported formats to `GroupedLinear`."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else [linear]
    if all(map(can_multiply, parts)):
        return NativeLinear([part for part in parts if isinstance(part, Codes)])
    if len(parts) > 1 and any(map(can_multiply, parts)):
        return JoinedLinear([pack_for_library(part) for part in parts])
    return blocks_to_groups(linear)


def round_to_q8_0(linear: Linear) -> Linear:
    """Round a plain projection to 8 bits in blocks of Q8_0.

    The projection is returned unchanged if its columns are not a multiple of 32.
    """
    columns = linear.weight.shape[1]
    if columns % _BYTES_COLUMNS:
        return linear
    count = max(1, _BLOCK_VALUES // columns)
    blocks = [_to_bytes(part.float()).view(len(part), -1) for part in linear.weight.split(count)]
    rounded = BlockLinear(_BYTES, torch.cat(blocks), columns, "a weight")
    rounded.bias = linear.bias
    return rounded


def _to_bytes(values: Tensor) -> Tensor:
    """Round float32 values to blocks of Q8_0 [count, bytes]."""
    blocks = values.view(-1, _BYTES_COLUMNS)
    scale = blocks.abs().amax(1, keepdim=True) / _BYTE_MOST
    steps = torch.where(scale > 0, 1 / scale, 0.0)
    codes = (blocks * steps).round_().to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), codes.view(torch.uint8)], 1)


def blocks_to_groups(linear: Linear) -> Linear:
    """Convert GGUF blocks to a `GroupedLinear`, for use without the C library or on a GPU."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else [linear]
    if not any(isinstance(part, BlockLinear) for part in parts):
        return linear
    made = [part.grouped() if isinstance(part, BlockLinear) else part for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    return join_projections(made, torch.cat(biases) if biases else None)


# --- layers ----------------------------------------------------------------------------------


def is_native(shape: ModelShape, weights: Any) -> bool:
    """Return whether the library can run all layers of a model, as `CLibraryLayers` does."""
    known = shape.norm == "rms" and shape.gated and shape.activation in _ACTIVATIONS
    products = (getattr(layer, name) for layer in weights.layers for name in _PRODUCTS)
    widths = shape.hidden % LANES == shape.head_dim % LANES == 0
    return known and widths and all(isinstance(each, NativeLinear) for each in products)


class CLibraryLayers:
    """All layers of Beamwright's own decoder, run by the C library.

    weights: `dense.DecoderWeights` for which `is_native` is true.
    far, near: float32 rotary tables; `near` for `shape.local_layers`, `far` for other layers.
    """

    def __init__(
        self, shape: ModelShape, weights: Any, far: RotaryTables | None, near: RotaryTables | None
    ) -> None:
        self._shape, self._kept = shape, [weights]
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        groups = {
            number: (group, place)
            for group, of_group in enumerate(shape.kv_layer_groups)
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
        self._rotary_lock = Lock()
        self._rotary_tables = [
            (far, {*range(shape.layers)} - {*shape.local_layers}),
            (near, shape.local_layers),
        ]
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
        begin_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run all layers and the final norm on x [rows, hidden]; see `Decoder.hidden`.

        foresee: called before each layer with the layer's number and input [rows, hidden], so that
            the view can load KV ahead.
        begin_layer: called with each layer's number before its weights are read; None: the weights
            of all layers are in memory.
        """
        shape, dtype, last = self._shape, x.dtype, _STAGES * self._shape.layers
        self._extend_rotary(positions)
        rows = self._allocate_rows(x, positions)
        described = (
            view.describe_layers() if isinstance(view, DecodeView) and read is None else None
        )
        if described is not None and begin_layer is None:
            self._run(rows, 0, last, described)
            return rows["normed"].to(dtype)
        done = 0  # stages that have run
        for number in range(shape.layers):
            first = _STAGES * number
            if begin_layer is not None:
                if done < first:  # the rest of a layer, before its buffer takes another one
                    self._run(rows, done, first)
                begin_layer(number)
                done = first
            if described is not None:
                done = first + _STAGES
                self._run(rows, first, done, described)
                continue
            self._run(rows, done, first + 1)
            if foresee is not None:
                foresee(number, rows["x"])
            heads = rows["turned"].to(dtype)
            key_value = heads[:, shape.heads :].unflatten(1, (2, shape.kv_heads))
            context = view.attend(number, heads[:, : shape.heads], key_value).float().contiguous()
            if read is not None and number == shape.layers - 1:
                rows = self._allocate_rows(rows["x"].index_select(0, read), positions)
                context = context.index_select(0, read)
            rows["context"] = context
            rows["turned"] = torch.empty_like(rows["turned"])  # the view may keep the old one
            done = first + 2
        if done < last:
            self._run(rows, done, last)
        return rows["normed"].to(dtype)

    def _extend_rotary(self, positions: Tensor) -> None:
        """Extend the rotary tables to these positions.

        Old tables are kept, because another thread may still read them.
        """
        last = int(positions.max()) if len(positions) else -1
        with self._rotary_lock:
            for tables, numbers in self._rotary_tables:
                if tables is not None and tables.extend_to(last):
                    self._kept.append((tables.cos, tables.sin))
                    for layer in (self._layers[number] for number in numbers):
                        layer.cos, layer.sin = tables.cos.data_ptr(), tables.sin.data_ptr()

    def _allocate_rows(self, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
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
        run_in_library(self._model, Pass(begin, end, len(rows["x"]), **places), attentions)
