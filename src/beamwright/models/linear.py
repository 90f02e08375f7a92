"""Projections as they are kept and multiplied: packed by oneDNN, in int8, in int4.

*oneDNN.* `torch.nn.functional.linear` goes to MKL on a CPU. MKL packs the weights in each call,
which for a few dozen rows costs as much as the product, hardly uses a second core
(docs/log/2026-11-21-operators-and-layout.md), and takes another kernel, with other last bits, for
another number of rows: on some CPUs at 8, on others at any. oneDNN's products were batch-invariant
on every CPU tried (docs/concepts/sameness.md), but for bfloat16 where a CPU multiplies tiles (AMX).
Sums of int8 are exact, so they are anywhere. The operators are private to torch, so they are tried,
and compared, before they are trusted.

*int8* is symmetric, one scale per row: torchao's tensor on a GPU, the same numbers without torchao,
whose import alone takes 0.15 GiB, on a CPU. Where that multiplies int8 exactly it ends as
oneDNN's (`packer`), and the LM head with it: activations are then rounded to 8 bits, too. Elsewhere
weights are turned back for each product.

*int4* has a scale and a zero point per group of 64 columns, as torchao's CUDA kernel wants them:
where that kernel runs (bfloat16, compute capability 8) the projection is torchao's tiled tensor;
elsewhere `Int4Linear` keeps two weights per byte and turns them back, block by block, in plain
torch. The sizes are counted in `plan.costs`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from beamwright.errors import InputError
from beamwright.models.decoder import Linear
from beamwright.plan.costs import GROUPED_TILE_VALUES, INT4_GROUP, Storage, storage_of

_ROWS_HINT = 64
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_BYTE_ZERO = 128
_BYTE_MOST = 127
_LEVELS = 15  # of 4 bits, above the lowest
_NARROW = 4
_ENDS = {4: torch.float16, 8: torch.float32}  # what scale and low are kept in, by the codes' bits
UNPACK = {
    4: torch.ops.quantized.embedding_bag_4bit_unpack,
    8: torch.ops.quantized.embedding_bag_byte_unpack,
}
_LEAST_SCALE = 2.0**-24  # of float16
_TILE_ROWS = 16
_CACHED_VALUES = 1 << 18  # 1 MiB
_BYTE_RANGE = 255
_KERNEL_CAPABILITY = (8, 0)
_BLOCK_VALUES = 1 << 20  # quantised at a time: in float32, with copies


class PackedLinear(Linear):
    """A projection whose weights are kept in oneDNN's order only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        super().__init__(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; rows have the same bits at any batch."""
        return _multiply(x, self.weight, self.bias)


class PackedInt8Linear(Linear):
    """A projection in int8 with a scale per row of weights, in oneDNN's order.

    A row of activations is rounded to 8 bits, too, with a scale of its own: largest to 127. The
    sums are exact integers, so a row's bits do not depend on the batch, nor on the CPU.
    weight: int8 [out, in]; scale: float32 [out].
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(torch.ops.onednn.qlinear_prepack(weight, None), bias)
        self.scale, self.columns = scale.contiguous(), weight.shape[1]
        self._zeros = torch.zeros(len(scale), dtype=torch.long)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product [rows, out] in x's dtype."""
        rounded, row_scale = to_bytes(x)
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, _BYTE_ZERO, self.weight, self.scale, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        product.mul_(row_scale)
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype)


def to_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] as uint8 around 128, and what a step is worth in each [rows, 1]."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    scale.div_(_BYTE_MOST)
    return (x / scale).round_().add_(_BYTE_ZERO).to(torch.uint8), scale


@cache
def multiplies_int8() -> bool:
    """Whether oneDNN's int8 products are here, and exact: some CPUs add pairs in 16 bits."""
    weight = torch.tensor([[127], [-128], [1]], dtype=torch.int8).expand(3, 256).contiguous()
    try:
        linear = PackedInt8Linear(weight, torch.ones(3), None)
        found = linear(torch.tensor([[127.0], [-127.0]]).expand(2, 256))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    exact = torch.tensor([[127.0, -128.0, 1.0]]) * 127 * 256
    return torch.equal(found, torch.cat([exact, -exact]))


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` for weights that do not stay; batch-invariant where oneDNN multiplies."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_multiply():
        return _multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@cache
def _can_multiply() -> bool:
    x, weight = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    try:
        found = _multiply(x, weight, None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return _close(found, F.linear(x, weight))


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    most = _TOLERANCE[found.dtype]
    return torch.allclose(found, expected, rtol=most, atol=most)


def prepack(linear: Linear) -> Linear:
    """The same projection, prepacked where torch can do it and gives the same results."""
    weight = linear.weight
    if isinstance(linear, JoinedLinear):
        return JoinedLinear([prepack(part) for part in linear.parts])
    if type(linear) is not Linear or type(weight) is not torch.Tensor:
        return linear  # quantised
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE:
        return linear
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(8, weight.shape[1], generator=generator).to(weight.dtype)
    try:
        packed = PackedLinear(weight, linear.bias)
        return packed if _close(packed(probe), linear(probe)) else linear
    except (RuntimeError, AttributeError, NotImplementedError):
        return linear


# --- int8 and int4 ---------------------------------------------------------------------------


class GroupedLinear(Linear):
    """Codes of 4 or 8 bits in groups of columns: value = code * scale + low, in float32.

    weight: uint8 [out, groups, bytes]: a group's codes, of 4 bits two to a byte, the first of them
    low; then its scale and low, in float16 beside 4 bits and in float32 beside 8. That is the
    layout of torch's embedding tables, whose operators turn tiles back on a CPU.
    """

    def __init__(
        self, bits: int, weight: torch.Tensor, columns: int, bias: torch.Tensor | None = None
    ) -> None:
        super().__init__(weight, bias)
        self.bits, self.columns = bits, columns

    @classmethod
    def of(
        cls, bits: int, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor
    ) -> GroupedLinear:
        """codes: uint8 [out, columns]; scale, low: [out, groups], rounded to what is kept."""
        rows, columns = codes.shape
        grouped = codes.view(rows, scale.shape[1], -1)
        if bits == _NARROW:
            grouped = grouped[..., ::2] | grouped[..., 1::2] << bits
        ends = torch.stack([scale, low], dim=-1).to(_ENDS[bits]).view(torch.uint8)
        return cls(bits, torch.cat([grouped, ends], dim=-1), columns)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.weight.shape[0], self.columns

    @property
    def ends(self) -> torch.Tensor:
        """Scales and lows [out, groups, 2]."""
        return _split(self.weight, self.bits)[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, by tiles of rows that are the same at any batch."""
        rows, on_cpu = self.weight.shape[0], x.device.type == "cpu"
        # A tile that was turned back stays in a core's cache for the product.
        most = _CACHED_VALUES if on_cpu else GROUPED_TILE_VALUES
        count = max(_TILE_ROWS, most // self.columns // _TILE_ROWS * _TILE_ROWS)
        wide = torch.float32 if on_cpu and x.dtype != torch.float64 else x.dtype
        values = x.to(wide)
        tiles = (slice(first, first + count) for first in range(0, rows, count))
        parts = [invariant_linear(values, self.values(tile).to(wide), None) for tile in tiles]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype)

    def values(self, rows: slice) -> torch.Tensor:
        """Those rows [rows, columns] in float32."""
        table = self.weight[rows]
        if table.device.type == "cpu" and turns_back(self.bits, table.shape[-1]):
            flat: torch.Tensor = UNPACK[self.bits](table.flatten(0, 1))
            return flat.view(len(table), -1)[:, : self.columns]
        return turned_back(table, self.bits)[:, : self.columns]


def turned_back(table: torch.Tensor, bits: int) -> torch.Tensor:
    """Values [rows, groups * group] in float32 of a table [rows, groups, bytes], in plain torch."""
    codes, ends = _split(table, bits)
    if bits == _NARROW:
        codes = torch.stack([codes & _LEVELS, codes >> bits], dim=-1).flatten(2)
    scale, low = ends.float().split(1, dim=-1)
    return torch.addcmul(low, codes.float(), scale).flatten(1)


def _split(table: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, ends = table.tensor_split([-2 * _ENDS[bits].itemsize], dim=-1)
    return codes, ends.contiguous().view(_ENDS[bits])


@cache
def turns_back(bits: int, width: int) -> bool:
    """Whether torch's operator is here, and gives what plain torch does, for groups so wide."""
    draws = torch.Generator().manual_seed(0)
    of_ends = 2 * _ENDS[bits].itemsize
    codes = torch.randint(256, (3, 1, width - of_ends), generator=draws, dtype=torch.uint8)
    ends = torch.rand(3, 1, 2, generator=draws).half().to(_ENDS[bits]).view(torch.uint8)
    table = torch.cat([codes, ends], dim=-1)
    try:
        return torch.equal(UNPACK[bits](table.flatten(0, 1)), turned_back(table, bits))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class JoinedLinear(Linear):
    """Projections of one input that are kept in different ways; their outputs stand in a row."""

    def __init__(self, parts: list[Linear]) -> None:
        super().__init__(parts[0].weight)
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def joined(parts: list[Linear], bias: torch.Tensor | None) -> Linear:
    """One projection of several, of which some are grouped. bias: of all of them."""
    first, alike = parts[0], {(type(part), part.weight.shape[1:]) for part in parts}
    if len(alike) == 1 and isinstance(first, GroupedLinear):  # bits follow from the shape
        table = first.weight if len(parts) == 1 else torch.cat([part.weight for part in parts])
        return GroupedLinear(first.bits, table, first.columns, bias)
    if bias is not None:
        rows = [part.weight.shape[0] for part in parts]
        for part, own in zip(parts, bias.split(rows), strict=True):
            part.bias = own
    return JoinedLinear(parts)


def as_grouped(weight: torch.Tensor) -> GroupedLinear:
    """A plain weight rounded to 4 bits in groups of 64 columns, block by block of its rows."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % INT4_GROUP)).view(rows, -1, INT4_GROUP)
    count = max(1, _BLOCK_VALUES // columns)
    tables = [_to_nibbles(block.float()).weight for block in padded.split(count)]
    return GroupedLinear(_NARROW, torch.cat(tables), columns)


class Int8Linear(Linear):
    """Weights int8 [out, in], a float32 scale per row [out]; multiplied by oneDNN on a CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(torch.empty_like(weight, dtype=torch.int8), bias)
        self.scale = torch.empty(len(weight), dtype=torch.float32)
        count = max(1, _BLOCK_VALUES // weight.shape[1])
        blocks = (whole.split(count) for whole in (weight, self.weight, self.scale))
        for block, kept, scales in zip(*blocks, strict=True):
            rows = block.float()
            scale = rows.abs().amax(1).div_(_BYTE_RANGE / 2)
            scales.copy_(scale.clamp_(min=torch.finfo(torch.float32).eps))  # as torchao does it
            kept.copy_(rows.mul(scales.reciprocal()[:, None]).round_().clamp_(-128, 127))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; the weights are turned back for it."""
        product = invariant_linear(x, self.weight.to(x.dtype), None)
        product.mul_(self.scale.to(x.dtype))
        return product if self.bias is None else product.add_(self.bias)


def _to_nibbles(groups: torch.Tensor) -> GroupedLinear:
    """Weights [rows, groups, 64], float32, each to the nearest of 16 levels of its group."""
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _LEVELS).clamp(min=_LEAST_SCALE).to(_ENDS[_NARROW]).float()
    low = low.to(_ENDS[_NARROW]).float()
    steps = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, _LEVELS)
    return GroupedLinear.of(_NARROW, steps.to(torch.uint8).flatten(1), scale, low)


def storage_for(
    weights: str, dtype: torch.dtype, device: str, option: str, *, is_packed: bool = False
) -> Storage:
    """How projections are kept on this device. option: the option that asks for it.

    is_packed: the checkpoint is quantised.

    Raises:
        InputError: if torchao is needed and not installed.
    """
    where = torch.device(device).type
    has_kernel = (
        weights == "int4"
        and (dtype, where) == (torch.bfloat16, "cuda")
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= _KERNEL_CAPABILITY
    )
    storage = storage_of(weights, has_int4_kernel=has_kernel, is_packed=is_packed)
    if storage in (Storage.INT8, Storage.INT4_TILED) and where != "cpu":
        _torchao(f"{option} {weights}")
    return storage


def quantise_linear(linear: Linear, storage: Storage) -> Linear:
    """One projection, kept so; its bias stays as it is."""
    if storage is Storage.INT8 and linear.weight.device.type == "cpu":
        return Int8Linear(linear.weight, linear.bias)
    if storage is Storage.INT8:
        ao = _torchao("int8")
        # From float32: torchao takes no float64, and scales are finer than a half precision.
        return Linear(ao.Int8Tensor.from_hp(linear.weight.float(), ao.PerRow()), linear.bias)
    if storage is Storage.INT4:
        return joined([as_grouped(linear.weight)], linear.bias)
    if storage is Storage.INT4_TILED:
        tensor = _torchao("int4").Int4TilePackedTo4dTensor
        return Linear(tensor.from_hp(linear.weight, [1, INT4_GROUP]), linear.bias)
    return linear


def packer(storage: Storage, dtype: torch.dtype, device: str) -> Callable[[Linear], Linear]:
    """What turns a projection that was read, and quantised, into the one that multiplies here."""
    on_cpu = torch.device(device).type == "cpu" and dtype != torch.float64
    if storage is not Storage.INT8 or not on_cpu or not multiplies_int8():
        return prepack

    def pack(linear: Linear) -> Linear:
        whole = linear if isinstance(linear, Int8Linear) else Int8Linear(linear.weight, linear.bias)
        return PackedInt8Linear(whole.weight, whole.scale, whole.bias)

    return pack


def _torchao(wanted_by: str) -> Any:
    """torchao.quantization, imported without its remarks on libraries for other machines."""
    try:
        with quiet_import():
            return import_module("torchao.quantization")
    except ImportError as error:
        raise InputError(
            f"{wanted_by} needs torchao: pip install 'beamwright[quant]' ({error})"
        ) from error


@contextmanager
def quiet_import() -> Iterator[None]:
    """No warnings: torchao remarks on libraries for other machines, and on deprecated calls."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
