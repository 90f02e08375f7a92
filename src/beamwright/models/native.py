"""Products with codes as they are kept, by the library that `csrc/` is built into.

Blocks of a GGUF file, groups of 4 bits (`GroupedLinear`), and weights rounded to 8 bits here, in
blocks of Q8_0. Activations are rounded to 8 bits, with a scale for each 32 columns. A row's bits
depend on neither the batch, the number of threads nor the CPU: `csrc/products.c` fixes the order of
sums. Without the library, codes are turned back into floating point for each product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beamwright.errors import NotFiniteError
from beamwright.library import NativePart, Projection, instruction_set, library
from beamwright.models.decoder import Linear
from beamwright.models.formats.gguf import BlockLinear
from beamwright.models.grouped import GroupedLinear, JoinedLinear, joined

_TILE = 16  # outputs
_NOT_FINITE = -2
_GROUPS = {(4, 32): 48, (4, 64): 49, (4, 128): 50}  # bits, columns: the library's kind
_BYTES, _BYTES_COLUMNS, _BYTE_MOST = 8, 32, 127  # Q8_0
_BLOCK_VALUES = 1 << 20  # rounded at a time: in float32, with copies

Codes = BlockLinear | GroupedLinear


def takes_blocks(dtype: torch.dtype) -> bool:
    """Whether files' blocks are multiplied as they are, between activations of this precision."""
    return library() is not None and dtype != torch.float64


class NativeLinear(Linear):
    """Projections of one input in codes that `is_taken`; their outputs stand in a row.

    parts: types, outputs and tiles of each. chosen: another instruction set than this CPU's best.
    """

    takes_one_row = True
    is_fixed = True

    def __init__(self, codes: Sequence[Codes], chosen: int | None = None) -> None:
        self.parts = [(_kind(each), len(each.weight), _tiles(each)) for each in codes]
        biases = [each.bias for each in codes if each.bias is not None]
        super().__init__(self.parts[0][2], torch.cat(biases).float() if biases else None)
        given = [NativePart(kind, outputs, tiles.data_ptr()) for kind, outputs, tiles in self.parts]
        sizes = len(given), codes[0].columns, sum(outs for _, outs, _ in self.parts)
        self.projection = Projection((NativePart * len(given))(*given), *sizes)
        self._place_bias()
        self._set = instruction_set() if chosen is None else chosen

    @property
    def form(self) -> tuple[object, ...]:
        return type(self), *(kind for kind, _, _ in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """The product [rows, out] in x's dtype.

        Raises:
            MemoryError: if there is none for x in 8 bits.
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
        """`transformers` hands one over with each call."""
        if self.bias is not None:
            self.bias = self.bias.float()
            self.projection.bias = self.bias.data_ptr()


def _kind(linear: Linear) -> int:
    """The library's number of its codes; -1 where it has none."""
    if isinstance(linear, GroupedLinear):
        return _GROUPS.get((linear.bits, linear.group), -1)
    return linear.kind if isinstance(linear, BlockLinear) else -1


def _tiles(codes: Codes) -> Tensor:
    """Codes in the library's order.

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


def is_taken(linear: Linear) -> bool:
    """Whether the library multiplies it."""
    if library() is None or not isinstance(linear, Codes):
        return False
    return bool(library().bw_tile_bytes(_kind(linear), linear.columns))


def packed(linear: Linear) -> Linear:
    """The same projection for the library, all that it takes; other blocks as groups."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else [linear]
    if all(map(is_taken, parts)):
        return NativeLinear([part for part in parts if isinstance(part, Codes)])
    if len(parts) > 1 and any(map(is_taken, parts)):
        return JoinedLinear([packed(part) for part in parts])
    return as_groups(linear)


def in_bytes(linear: Linear) -> Linear:
    """A plain projection rounded to blocks of Q8_0, where its columns fill them."""
    columns = linear.weight.shape[1]
    if columns % _BYTES_COLUMNS:
        return linear
    count = max(1, _BLOCK_VALUES // columns)
    blocks = [_to_bytes(part.float()).view(len(part), -1) for part in linear.weight.split(count)]
    rounded = BlockLinear(_BYTES, torch.cat(blocks), columns, "a weight")
    rounded.bias = linear.bias
    return rounded


def _to_bytes(values: Tensor) -> Tensor:
    """Blocks of Q8_0 [count, bytes] of float32 values."""
    blocks = values.view(-1, _BYTES_COLUMNS)
    scale = blocks.abs().amax(1, keepdim=True) / _BYTE_MOST
    steps = torch.where(scale > 0, 1 / scale, 0.0)
    codes = (blocks * steps).round_().to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), codes.view(torch.uint8)], 1)


def as_groups(linear: Linear) -> Linear:
    """The same projection without a file's blocks: in groups that torch, or a card, multiplies."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else [linear]
    if not any(isinstance(part, BlockLinear) for part in parts):
        return linear
    made = [part.grouped() if isinstance(part, BlockLinear) else part for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    return joined(made, torch.cat(biases) if biases else None)
