"""Converts projections to the format in which they are multiplied: packed by oneDNN, int8 or int4.

*oneDNN.* On a CPU `torch.nn.functional.linear` calls MKL, which has three faults. It packs the
weights in each call, which for a few dozen rows costs as much as the product. It hardly uses a
second core (docs/log/2026-11.md#operators-and-layout). And it is not batch-invariant: it chooses
its kernel by the number of rows. oneDNN's products were batch-invariant on every CPU tried
(docs/concepts/sameness.md), except in bfloat16 on CPUs that multiply tiles (AMX). Its operators are
private to torch, so their results are compared with `F.linear` before they are used.

*int8* is symmetric. On a CPU it has a scale per block of 32 columns, and the LM head is int8 too.
On a GPU it has a scale per row. *int4* has a scale and a zero point per group of 64 columns, or per
group of a quantised checkpoint. On a CPU the C library multiplies both (`models.native`).

On a GPU Beamwright's kernels read both formats directly (`codes`, `streaming`). Without a kernel,
for instance in float64, weights are dequantised tile by tile. `plan.costs` counts the bytes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from beamwright.attention.kernels import why_no_kernels
from beamwright.models.decoder import Linear
from beamwright.models.grouped import (
    TOLERANCE,
    GroupedLinear,
    JoinedLinear,
    invariant_linear,
    is_close,
    join_projections,
    onednn_linear,
    round_to_groups,
)
from beamwright.models.native import (
    blocks_to_groups,
    library_accepts,
    pack_for_library,
    round_to_q8_0,
)
from beamwright.plan.costs import GROUPED_TILE_VALUES, Storage

_REMARKS = ("torchao", "torch.utils._pytree", "transformers")
_ROWS_HINT = 64
_PROBED = 256  # maximum outputs of a self-test; more would not change the order of sums
_BYTE_ZERO = 128
_BYTE_RANGE = 255
_BLOCK_VALUES = 1 << 20  # values quantised at once, which bounds the float32 copies


class PackedLinear(Linear):
    """A projection whose weights are stored only in oneDNN's packed order.

    Where oneDNN sums a single row in another order than several rows, a single row is computed as
    two equal rows.
    """

    is_exact_for_one_row = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        super().__init__(packed, bias)
        outputs, columns = weight.shape
        self._doubles = not sums_one_row_alike(min(outputs, _PROBED), columns, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, which is batch-invariant."""
        if self._doubles and len(x) == 1:
            return onednn_linear(torch.cat([x, x]), self.weight, self.bias)[:1]
        return onednn_linear(x, self.weight, self.bias)


@cache
def sums_one_row_alike(outputs: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether oneDNN sums a single row in the same order as several rows.

    On CPUs with AVX-512 it did so only up to 1,024 columns. The probe's sums would be zero without
    rounding, so its results are rounding errors, which depend on the order of the sum.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(columns, generator=generator)
    drawn = torch.randn(outputs + 8, columns // 2, generator=generator)
    drawn = torch.cat([drawn, drawn, drawn.new_zeros(len(drawn), columns % 2)], 1)
    drawn[8:, : columns // 2].neg_()
    x, weight = drawn[:, order].to(dtype).split([8, outputs])
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    alone = [onednn_linear(row, packed, None) for row in x.split(1)]
    return torch.equal(onednn_linear(x, packed, None), torch.cat(alone))


def prepack_linear(linear: Linear) -> Linear:
    """Return the projection packed for oneDNN, or unchanged where that fails or differs."""
    weight = linear.weight
    if isinstance(linear, JoinedLinear):
        return JoinedLinear([prepack_linear(part) for part in linear.parts])
    if type(linear) is not Linear or type(weight) is not Tensor:
        return linear  # quantised, so oneDNN cannot pack it
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return linear
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(8, weight.shape[1], generator=generator).to(weight.dtype)
    try:
        packed = PackedLinear(weight, linear.bias)
        return packed if is_close(packed(probe), linear(probe)) else linear
    except (RuntimeError, AttributeError, NotImplementedError):
        return linear


# --- int8 and int4 ---------------------------------------------------------------------------


class Int8Linear(Linear):
    """A projection with weights int8 [out, in] and one float32 scale per row [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(torch.empty_like(weight, dtype=torch.int8), bias)
        self.scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        count = max(1, _BLOCK_VALUES // weight.shape[1])
        blocks = (whole.split(count) for whole in (weight, self.weight, self.scale))
        for block, kept, scales in zip(*blocks, strict=True):
            rows = block.float()
            scale = rows.abs().amax(1).div_(_BYTE_RANGE / 2)
            scales.copy_(scale.clamp_(min=torch.finfo(torch.float32).eps))
            kept.copy_(rows.mul(scales.reciprocal()[:, None]).round_().clamp_(-128, 127))

    @property
    def stored(self) -> list[Tensor]:
        return [self.weight, self.scale]

    def place_stored(self, tensors: Sequence[Tensor]) -> None:
        self.weight, self.scale = tensors

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [rows, out]. Weights are dequantised one part at a time."""
        parts = self.weight.split(max(1, GROUPED_TILE_VALUES // self.weight.shape[1]))
        products = [invariant_linear(x, part.to(x.dtype), None) for part in parts]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        product.mul_(self.scale.to(x.dtype))
        return product if self.bias is None else product.add_(self.bias)

    def grouped(self) -> Linear:
        """Return the same projection as a `GroupedLinear` in which each row is one group."""
        codes, scale = self.weight.view(torch.uint8) ^ _BYTE_ZERO, self.scale[:, None]
        return join_projections([GroupedLinear.of(8, codes, scale, -_BYTE_ZERO * scale)], self.bias)


def quantise_linear(linear: Linear, storage: Storage) -> Linear:
    """Round a plain projection to the format `storage`; the bias stays plain."""
    if storage is Storage.BYTES and (rounded := round_to_q8_0(linear)) is not linear:
        return rounded
    if storage in (Storage.INT8, Storage.BYTES):
        kept = Int8Linear(linear.weight, linear.bias)
        return kept if linear.weight.device.type == "cpu" else kept.grouped()
    if storage is Storage.INT4:
        return join_projections([round_to_groups(linear.weight)], linear.bias)
    return linear


def head_linear(linear: Linear, storage: Storage) -> Linear:
    """Return the LM head, in 8-bit blocks if `storage` is BYTES, otherwise unchanged."""
    return round_to_q8_0(linear) if storage is Storage.BYTES else linear


def make_packer(
    storage: Storage, dtype: torch.dtype, device: str, *, fixed: bool = False, kernels: bool = True
) -> Callable[[Linear], Linear]:
    """Return a function that converts each loaded projection to the format it is multiplied in.

    fixed: on a GPU, use Beamwright's kernels for all products (`trials.KernelChooser`).
    kernels: False to use no Triton kernels (`--attention reference`).
    """
    where, pack = torch.device(device), prepack_linear
    if where.type == "cpu":
        codes = pack_for_library if library_accepts(dtype) else blocks_to_groups
        return lambda linear: prepack_linear(codes(linear))
    if kernels and where.type == "cuda" and why_no_kernels(where, dtype) is None:
        from beamwright.models.trials import KernelChooser  # noqa: PLC0415 (loads Triton)

        pack = KernelChooser(always=fixed, dtype=dtype)
    return (lambda linear: pack(blocks_to_groups(linear))) if storage.is_stored else pack


@contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress the warnings that imports of torchao and `transformers` print.

    torchao warns of libraries for other machines and of deprecated calls. `transformers` warns of
    kernels that are not installed.
    """
    loggers = [logging.getLogger(name) for name in _REMARKS]
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
