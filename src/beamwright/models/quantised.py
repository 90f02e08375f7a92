"""int8 and int4 weights: a layer's projections, quantised one layer at a time.

int8 is torchao's tensor: symmetric, one scale per row. On a CPU that multiplies int8 exactly it
ends as oneDNN's (`packer`), and the LM head with it: activations are then rounded to 8 bits, too.
Elsewhere weights are turned back for each product. int4 has a scale and a zero point per group
of 64 columns, as torchao's CUDA kernel wants them: where that kernel runs (bfloat16, compute
capability 8) the projection is torchao's tiled tensor; elsewhere `Int4Linear` keeps two weights per
byte and turns them back, block by block, in plain torch. The sizes are counted in `cost.model`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from beamwright.cost.model import INT4_BLOCK_ROWS, INT4_GROUP, Storage, storage_of
from beamwright.errors import InputError
from beamwright.models.decoder import Layer, Linear
from beamwright.models.onednn import (
    PackedInt8Linear,
    invariant_linear,
    multiplies_int8,
    prepack,
)
from beamwright.models.quiet import quiet_import

_LEVELS = 15  # of 4 bits, above the lowest
_MIDDLE = 8
_KERNEL_CAPABILITY = (8, 0)
_HEAD_BLOCK = 8192  # rows

LayerTransform = Callable[[Layer], Layer]


class Int4Linear(Linear):
    """Two weights per byte; value = (nibble - 8) * scale + zero.

    weight: uint8 [out, groups, 32], a group's first 32 columns in the low nibbles; scale, zero:
    [out, groups, 1] in the model's dtype. The last group is padded with zeros.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rows, self.columns = weight.shape
        padded = F.pad(weight, (0, -self.columns % INT4_GROUP)).view(rows, -1, INT4_GROUP)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        parts = [_to_nibbles(part.to(wide), weight.dtype) for part in padded.split(INT4_BLOCK_ROWS)]
        nibbles, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
        super().__init__(nibbles, bias)
        self.scale, self.zero = scales, zeros

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, by blocks of rows that are the same at any batch."""
        rows = self.weight.shape[0]
        parts = []
        for first in range(0, rows, INT4_BLOCK_ROWS):
            block = slice(first, first + INT4_BLOCK_ROWS)
            bias = None if self.bias is None else self.bias[block]
            parts.append(invariant_linear(x, self.values(block), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def values(self, block: slice) -> torch.Tensor:
        """Those rows [rows, columns] in the model's dtype."""
        packed = self.weight[block]
        nibbles = torch.cat([packed & 15, packed >> 4], dim=-1).to(self.scale.dtype).sub_(_MIDDLE)
        values = torch.addcmul(self.zero[block], nibbles, self.scale[block])
        return values.flatten(1)[:, : self.columns]


class Int8Linear(Linear):
    """torchao's tensor, one scale per row of weights [out, in], multiplied by oneDNN on a CPU."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product; what torchao computes, whose product on a CPU follows the batch."""
        if x.device.type != "cpu":
            return super().__call__(x)
        weight: Any = self.weight
        product = invariant_linear(x, weight.qdata.to(x.dtype), None)
        product.mul_(weight.scale.to(x.dtype).flatten())
        return product if self.bias is None else product.add_(self.bias)


def _to_nibbles(
    groups: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [rows, groups, 64] to packed nibbles, scales and zero points (of that dtype)."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / _LEVELS).clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)
    zero = (low + scale * _MIDDLE).to(dtype)
    lowest = zero.to(groups.dtype) - scale.to(groups.dtype) * _MIDDLE
    steps = ((groups - lowest) / scale).round_().clamp_(0, _LEVELS).to(torch.uint8)
    first, second = steps.chunk(2, dim=-1)
    return first | second << 4, scale, zero


def storage_for(weights: str, dtype: torch.dtype, device: str, option: str) -> Storage:
    """How projections are kept on this device. option: the option that asks for it.

    Raises:
        InputError: if torchao is needed and not installed.
    """
    has_kernel = weights == "int4" and _has_int4_kernel(dtype, device)
    storage = storage_of(weights, has_int4_kernel=has_kernel)
    if storage in (Storage.INT8, Storage.INT4_TILED):
        _torchao(f"{option} {weights}")
    return storage


def quantiser(storage: Storage) -> LayerTransform:
    """What turns a layer that was just read into the layer that is kept."""

    def quantise(layer: Layer) -> Layer:
        names = [name for name, part in vars(layer).items() if isinstance(part, Linear)]
        for name in names:
            setattr(layer, name, quantise_linear(getattr(layer, name), storage))
        return layer

    return quantise


def quantise_linear(linear: Linear, storage: Storage) -> Linear:
    """One projection, kept so; its bias stays as it is."""
    if storage is Storage.INT8:
        ao = _torchao("int8")
        # From float32: torchao takes no float64, and scales are finer than a half precision.
        return Int8Linear(ao.Int8Tensor.from_hp(linear.weight.float(), ao.PerRow()), linear.bias)
    if storage is Storage.INT4:
        return Int4Linear(linear.weight, linear.bias)
    if storage is Storage.INT4_TILED:
        tensor = _torchao("int4").Int4TilePackedTo4dTensor
        return Linear(tensor.from_hp(linear.weight, [1, INT4_GROUP]), linear.bias)
    return linear


def packer(storage: Storage, dtype: torch.dtype, device: str) -> Callable[[Linear], Linear]:
    """What turns a projection that was read, and quantised, into the one that multiplies here."""
    if storage is not Storage.INT8 or torch.device(device).type != "cpu":
        return prepack
    if dtype == torch.float64 or not multiplies_int8():
        return prepack

    def pack(linear: Linear) -> Linear:
        if type(linear) is Linear:
            weight, scale = _in_blocks(linear.weight)
        else:
            kept: Any = linear.weight
            weight, scale = kept.qdata, kept.scale.flatten().float()
        return PackedInt8Linear(weight, scale, linear.bias)

    return pack


def _in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An LM head [out, in] in int8, and its scales [out]; in float32 a block of it at a time."""
    parts: list[Any] = [
        quantise_linear(Linear(rows), Storage.INT8).weight for rows in weight.split(_HEAD_BLOCK)
    ]
    return (
        torch.cat([part.qdata for part in parts]),
        torch.cat([part.scale.flatten().float() for part in parts]),
    )


def dequantised(linear: Linear, dtype: torch.dtype) -> Linear:
    """The same projection in the model's dtype: what a quantised product has to equal."""
    if isinstance(linear, Int4Linear):
        return Linear(linear.values(slice(None)), linear.bias)
    if isinstance(linear, PackedInt8Linear):
        return Linear(linear.values().to(dtype), linear.bias)
    if type(linear.weight) is torch.Tensor:
        return linear
    # torchao's tiles have no way back but the product with the identity.
    identity = torch.eye(linear.weight.shape[1], device=linear.weight.device, dtype=dtype)
    return Linear(F.linear(identity, linear.weight).t().contiguous(), linear.bias)


def _has_int4_kernel(dtype: torch.dtype, device: str) -> bool:
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    if dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= _KERNEL_CAPABILITY


def _torchao(wanted_by: str) -> Any:
    """torchao.quantization, imported without its remarks on libraries for other machines."""
    try:
        with quiet_import():
            return import_module("torchao.quantization")
    except ImportError as error:
        raise InputError(
            f"{wanted_by} needs torchao: pip install 'beamwright[quant]' ({error})"
        ) from error
