"""Projections whose weights are 4-bit or 8-bit codes with a scale for each group of columns.

`GroupedLinear` is the format. Quantised checkpoints are read into it, and plain weights are rounded
to it for `--weights int4`. On a CPU the C library multiplies 4-bit codes directly
(`models.native`). Otherwise weights are dequantised tile by tile, and each tile is multiplied while
it is in a core's cache. Some operators used here are private to torch, so their results are
compared with plain torch before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.errors import InputError, NotFiniteError
from beamwright.models.decoder import Linear
from beamwright.plan.costs import GROUPED_TILE_VALUES, INT4_GROUP

_LEVELS = 15  # the largest 4-bit code
_NARROW = 4
_ENDS = {4: torch.float16, 8: torch.float32}  # dtype of scale and low, by the bits of a code
_LEAST_SCALE = 2.0**-24  # the smallest positive float16
_TILE_ROWS = 16
_CACHED_VALUES = 1 << 18  # float32 values of a tile, 1 MiB
UNPACK = {
    4: torch.ops.quantized.embedding_bag_4bit_unpack,
    8: torch.ops.quantized.embedding_bag_byte_unpack,
}
_BLOCK_VALUES = 1 << 20  # values quantised at once


# --- products by oneDNN, which are batch-invariant (docs/concepts/sameness.md) ---------------

# Relative and absolute tolerance of `is_close`, for each dtype that oneDNN may multiply here.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` with a weight that is not packed, by oneDNN where it is available."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_multiply():
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` with oneDNN. `weight` may be packed in oneDNN's own order."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@cache
def _can_multiply() -> bool:
    x, weight = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    try:
        product = onednn_linear(x, weight, None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return is_close(product, F.linear(x, weight))


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two results of a product differ by no more than rounding."""
    most = TOLERANCE[actual.dtype]
    return torch.allclose(actual, expected, rtol=most, atol=most)


# --- codes ---------------------------------------------------------------------------------------


def check_size(actual: tuple[int, ...], size: tuple[int, ...], what: str) -> None:
    """Check the size of a weight.

    actual: the size in the file. size: the size that the config requires.
    what: the weight's name, for the message.

    Raises:
        InputError: if the sizes differ.
    """
    if actual != size:
        raise InputError(f"{what} has shape {actual}, config says {size}")


class GroupedLinear(Linear):
    """A projection with quantised weights: code * scale + low, in float32.

    Each group of columns has a scale and a low, which is the value of code 0.

    bits: bits of a code, 4 or 8.
    weight: uint8 [out, groups, bytes]. Each group has its codes, then its scale and low. Two 4-bit
        codes share a byte, the first in the low half. Scale and low are float16 with 4-bit codes
        and float32 with 8-bit codes. This is the layout of torch's quantised embedding tables,
        whose operators dequantise tiles on a CPU.
    columns: number of columns, without the padding of the last group.
    """

    def __init__(self, bits: int, weight: Tensor, columns: int, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.bits, self.columns = bits, columns

    @classmethod
    def of(cls, bits: int, codes: Tensor, scale: Tensor, low: Tensor) -> GroupedLinear:
        """Make a projection from codes, uint8 [out, columns], and scale and low [out, groups].

        Scale and low are rounded to float16 for 4 bits, and to float32 for 8 bits.
        """
        rows, columns = codes.shape
        grouped = codes.view(rows, scale.shape[1], -1)
        if bits == _NARROW:
            grouped = grouped[..., ::2] | grouped[..., 1::2] << bits
        ends = torch.stack([scale, low], dim=-1).to(_ENDS[bits]).view(torch.uint8)
        return cls(bits, torch.cat([grouped, ends], dim=-1), columns)

    @property
    def size(self) -> tuple[int, int]:
        """The weight's size (outputs, columns)."""
        return self.weight.shape[0], self.columns

    @property
    def kernel_key(self) -> tuple[object, ...]:
        return type(self), self.bits, self.group

    @property
    def group(self) -> int:
        """The number of columns of a group."""
        return (self.weight.shape[2] - 2 * _ENDS[self.bits].itemsize) * 8 // self.bits

    @property
    def scales_and_lows(self) -> Tensor:
        """The scale and low of each group [out, groups, 2]."""
        return _split(self.weight, self.bits)[1]

    def codes(self, rows: slice) -> Tensor:
        """Return the codes of `rows`, one per byte: uint8 [rows, groups * group]."""
        return _codes(self.weight[rows], self.bits)[0].flatten(1)

    def check_and_place(self, size: tuple[int, ...], device: str, what: str) -> GroupedLinear:
        """Check size and scales, move the weight to `device`, and return this projection.

        what: name of the weight, for messages.

        Raises:
            InputError: if the weight does not have this size, or a scale or low is not finite.
        """
        check_size(self.size, size, what)
        if not bool(self.scales_and_lows.isfinite().all()):
            raise NotFiniteError(f"{what} holds NaN or infinite scales: the file is damaged")
        self.weight = self.weight.to(device)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [rows, out]. Weights are dequantised one tile of outputs at a time.

        The tiles do not depend on the batch.
        """
        rows, on_cpu = self.weight.shape[0], x.device.type == "cpu"
        # On a CPU a dequantised tile is small enough to stay in a core's cache for the product.
        most = _CACHED_VALUES if on_cpu else GROUPED_TILE_VALUES
        count = max(_TILE_ROWS, most // self.columns // _TILE_ROWS * _TILE_ROWS)
        wide = torch.float32 if on_cpu and x.dtype != torch.float64 else x.dtype
        values = x.to(wide)
        tiles = (slice(first, first + count) for first in range(0, rows, count))
        parts = [invariant_linear(values, self.dequantise(tile).to(wide), None) for tile in tiles]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype)

    def dequantise(self, rows: slice) -> Tensor:
        """Return the dequantised weights of `rows`: float32 [rows, columns]."""
        table = self.weight[rows]
        if table.device.type == "cpu" and can_unpack(self.bits, table.shape[-1]):
            flat: Tensor = UNPACK[self.bits](table.flatten(0, 1))
            return flat.view(len(table), -1)[:, : self.columns]
        return dequantise_table(table, self.bits)[:, : self.columns]


def dequantise_table(table: Tensor, bits: int) -> Tensor:
    """Dequantise a table [rows, groups, bytes] to float32 [rows, groups * group] in plain torch."""
    codes, ends = _codes(table, bits)
    scale, low = ends.float().split(1, dim=-1)
    return torch.addcmul(low, codes.float(), scale).flatten(1)


def _codes(table: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Unpack a table [rows, groups, bytes] to codes [rows, groups, group], and scale and low."""
    codes, ends = _split(table, bits)
    if bits == _NARROW:
        codes = torch.stack([codes & _LEVELS, codes >> bits], dim=-1).flatten(2)
    return codes, ends


def _split(table: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes, ends = table.tensor_split([-2 * _ENDS[bits].itemsize], dim=-1)
    return codes, ends.contiguous().view(_ENDS[bits])


@cache
def can_unpack(bits: int, width: int) -> bool:
    """Return whether torch has an operator that dequantises groups of `width` bytes correctly."""
    draws = torch.Generator().manual_seed(0)
    of_ends = 2 * _ENDS[bits].itemsize
    codes = torch.randint(256, (3, 1, width - of_ends), generator=draws, dtype=torch.uint8)
    ends = torch.rand(3, 1, 2, generator=draws).half().to(_ENDS[bits]).view(torch.uint8)
    table = torch.cat([codes, ends], dim=-1)
    try:
        return torch.equal(UNPACK[bits](table.flatten(0, 1)), dequantise_table(table, bits))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class JoinedLinear(Linear):
    """Several projections of one input, in different formats, whose outputs are concatenated."""

    def __init__(self, parts: list[Linear]) -> None:
        super().__init__(parts[0].weight)
        self.parts = parts

    @property
    def kernel_key(self) -> tuple[object, ...]:
        return tuple(part.kernel_key for part in self.parts)

    @property
    def stored(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.stored]

    def place_stored(self, tensors: Sequence[Tensor]) -> None:
        given = iter(tensors)
        for part in self.parts:
            part.place_stored([next(given) for _ in part.stored])
        self.weight = self.parts[0].weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def join_projections(parts: list[Linear], bias: Tensor | None) -> Linear:
    """Join projections of the same input into one. At least one of them must be quantised.

    bias: the bias of all outputs; None: no bias.
    """
    first, alike = parts[0], {(type(part), part.weight.shape[1:]) for part in parts}
    if len(alike) == 1 and isinstance(first, GroupedLinear):  # equal shapes have equal bits
        table = first.weight if len(parts) == 1 else torch.cat([part.weight for part in parts])
        return GroupedLinear(first.bits, table, first.columns, bias)
    if bias is not None:
        rows = [part.weight.shape[0] for part in parts]
        for part, own in zip(parts, bias.split(rows), strict=True):
            part.bias = own
    return JoinedLinear(parts)


def round_to_groups(weight: Tensor, group: int = INT4_GROUP) -> GroupedLinear:
    """Round a plain weight to 4 bits, with a scale per `group` columns, some rows at a time."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % group)).view(rows, -1, group)
    count = max(1, _BLOCK_VALUES // columns)
    tables = [_to_nibbles(block.float()).weight for block in padded.split(count)]
    return GroupedLinear(_NARROW, torch.cat(tables), columns)


def _to_nibbles(groups: Tensor) -> GroupedLinear:
    """Round weights, float32 [rows, groups, group], to the nearest of 16 levels of each group.

    The levels are evenly spaced between the group's smallest and largest weight.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _LEVELS).clamp(min=_LEAST_SCALE).to(_ENDS[_NARROW]).float()
    low = low.to(_ENDS[_NARROW]).float()
    steps = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, _LEVELS)
    return GroupedLinear.of(_NARROW, steps.to(torch.uint8).flatten(1), scale, low)
