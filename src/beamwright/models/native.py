"""Products with the codes of a GGUF file as they are, by the library that `csrc/` is built into.

Activations are rounded to 8 bits, with a scale for each 32 columns. A row's bits depend on neither
the batch, the number of threads nor the CPU: `csrc/products.c` fixes the order of sums. Without
the library, blocks are turned back into floating point for each product (`GroupedLinear`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beamwright.errors import NotFiniteError
from beamwright.library import NativePart, Projection, library
from beamwright.models.decoder import Linear
from beamwright.models.formats.gguf import BlockLinear
from beamwright.models.grouped import JoinedLinear, joined

_TILE = 16  # outputs
_NOT_FINITE = -2


def takes_blocks(dtype: torch.dtype) -> bool:
    """Whether files' blocks are multiplied as they are, between activations of this precision."""
    return library() is not None and dtype != torch.float64


class NativeLinear(Linear):
    """Projections of one input in blocks of GGUF's types; their outputs stand in a row.

    blocks: whose types and columns `is_taken`. parts: types, outputs and tiles of each.
    """

    takes_one_row = True
    is_fixed = True

    def __init__(self, blocks: Sequence[BlockLinear], instruction_set: int | None = None) -> None:
        self.parts = [(each.kind, len(each.weight), _tiles(each)) for each in blocks]
        biases = [each.bias for each in blocks if each.bias is not None]
        super().__init__(self.parts[0][2], torch.cat(biases).float() if biases else None)
        given = [NativePart(kind, outputs, tiles.data_ptr()) for kind, outputs, tiles in self.parts]
        sizes = len(given), blocks[0].columns, sum(outs for _, outs, _ in self.parts)
        self.projection = Projection((NativePart * len(given))(*given), *sizes)
        self._place_bias()
        self._set = library().bw_best() if instruction_set is None else instruction_set

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


def _tiles(blocks: BlockLinear) -> Tensor:
    """Blocks in the library's order.

    Raises:
        NotFiniteError: if a scale is NaN or infinite.
    """
    outputs, rows = len(blocks.weight), blocks.weight.contiguous()
    size = library().bw_tile_bytes(blocks.kind, blocks.columns)
    tiles = torch.empty(-(-outputs // _TILE) * size, dtype=torch.uint8)
    found = library().bw_pack(
        blocks.kind, rows.data_ptr(), outputs, blocks.columns, tiles.data_ptr()
    )
    if found == _NOT_FINITE:
        raise NotFiniteError(f"{blocks.what} holds NaN or infinite scales: the file is damaged")
    return tiles


def is_taken(linear: Linear) -> bool:
    """Whether the library multiplies it."""
    if library() is None or not isinstance(linear, BlockLinear):
        return False
    return bool(library().bw_tile_bytes(linear.kind, linear.columns))


def packed(linear: Linear) -> Linear:
    """The same projection for the library, all that it takes; other blocks as groups."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else [linear]
    if all(map(is_taken, parts)):
        return NativeLinear([part for part in parts if isinstance(part, BlockLinear)])
    if len(parts) > 1 and any(map(is_taken, parts)):
        return JoinedLinear([packed(part) for part in parts])
    return as_groups(linear)


def as_groups(linear: Linear) -> Linear:
    """The same projection without a file's blocks: in groups that torch, or a card, multiplies."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else [linear]
    if not any(isinstance(part, BlockLinear) for part in parts):
        return linear
    made = [part.grouped() if isinstance(part, BlockLinear) else part for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    return joined(made, torch.cat(biases) if biases else None)
