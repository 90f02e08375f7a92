"""What a cost needs to know of a model and of a machine: sizes, in any precision. No torch.

`Shape` and `Hardware` are seams: the rooms that own model shapes and hardware profiles are not
imported here; their objects fit by their attributes. Only the projections inside the layers are
quantised; embeddings, LM head, norms and biases keep the model's precision. `models.quantised`
makes the tensors whose sizes are counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Protocol

INT4_GROUP = 64
"""Columns that share one scale and one zero point."""
INT4_BLOCK_ROWS = 1024
"""Rows that are turned back into floating point at a time, where no kernel reads int4 itself."""

_TILE_ROWS, _TILE_COLUMNS = 8, 1024  # torchao's tiled layout is padded to these


class Shape(Protocol):
    """The attributes of a model shape that costs are made of."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def projections(self) -> tuple[tuple[int, int], ...]: ...
    def kv_bytes_per_token(self, element_bytes: int, /) -> int: ...


class Hardware(Protocol):
    """The attributes of a hardware profile that costs are made of; see `hardware.profile`."""

    @property
    def device_bandwidth(self) -> float: ...
    @property
    def flops(self) -> float: ...
    @property
    def h2d_bandwidth(self) -> float: ...
    @property
    def d2h_bandwidth(self) -> float: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def copy_launch_s(self) -> float: ...
    @property
    def decode_ops_per_layer(self) -> int: ...
    @property
    def bandwidth_share(self) -> float: ...
    @property
    def copies_share(self) -> float: ...
    @property
    def flops_share(self) -> float: ...
    @property
    def link_share(self) -> float: ...


class Storage(StrEnum):
    """How a projection is kept.

    INT8: torchao, a float32 scale per row; turned back into floating point for each product.
    INT4: two weights per byte, turned back a block of rows at a time for each product.
    INT4_TILED: torchao's tiles, which its CUDA kernel reads as they are.
    """

    PLAIN = "plain"
    INT8 = "int8"
    INT4 = "int4"
    INT4_TILED = "int4-tiled"


def storage_of(weights: str, *, has_int4_kernel: bool) -> Storage:
    """What `--weights` means. has_int4_kernel: a CUDA device of compute capability 8, bfloat16."""
    if weights == "int4":
        return Storage.INT4_TILED if has_int4_kernel else Storage.INT4
    return Storage.INT8 if weights == "int8" else Storage.PLAIN


def matrix_bytes(rows: int, columns: int, element_bytes: int, storage: Storage) -> int:
    """Bytes of one projection [rows, columns], its scales and zero points included."""
    if storage is Storage.PLAIN:
        return rows * columns * element_bytes
    if storage is Storage.INT8:
        return rows * (columns + 4 + 1)
    if storage is Storage.INT4_TILED:
        rows, columns = _up(rows, _TILE_ROWS), _up(columns, _TILE_COLUMNS)
    num_groups = rows * -(-columns // INT4_GROUP)
    return num_groups * (INT4_GROUP // 2 + 2 * element_bytes)


def weight_bytes(shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN) -> int:
    """Bytes of all weights of a model. element_bytes: of what is not quantised."""
    if storage is Storage.PLAIN:
        return shape.num_parameters * element_bytes
    projections = shape.projections
    others = shape.num_parameters - shape.layers * sum(map(prod, projections))
    quantised = sum(matrix_bytes(*each, element_bytes, storage) for each in projections)
    return others * element_bytes + shape.layers * quantised


def conversion_bytes(shape: Shape, element_bytes: int, storage: Storage) -> int:
    """Memory traffic of one forward pass for turning weights back into floating point.

    They are written and read again, beside being read as they are stored.
    """
    if storage in (Storage.PLAIN, Storage.INT4_TILED):
        return 0
    return 2 * shape.layers * sum(map(prod, shape.projections)) * element_bytes


def product_scratch_bytes(
    shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN
) -> int:
    """Working memory of the largest product, beside its input and output."""
    if storage is Storage.INT8:
        return max(map(prod, shape.projections)) * element_bytes
    if storage is Storage.INT4:
        widest = max(columns for _, columns in shape.projections)
        # A block's nibbles as bytes, as floating point, and with scale and zero point.
        return INT4_BLOCK_ROWS * _up(widest, INT4_GROUP) * (1 + 2 * element_bytes)
    return 0


@dataclass(frozen=True)
class ModelCosts:
    """Sizes of one model in one precision. num_heads: query heads.

    conversion_bytes: memory traffic of a forward pass beyond reading the weights as they are
    stored, where they are turned back into floating point first.
    """

    num_layers: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    num_heads: int
    head_dim: int
    element_bytes: int
    conversion_bytes: int = 0

    @classmethod
    def of(cls, shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN) -> ModelCosts:
        """The costs of a shape whose KV, and weights but for `storage`, take `element_bytes`."""
        return cls(
            num_layers=shape.layers,
            num_parameters=shape.num_parameters,
            weight_bytes=weight_bytes(shape, element_bytes, storage),
            kv_bytes_per_token=shape.kv_bytes_per_token(element_bytes),
            num_heads=shape.heads,
            head_dim=shape.head_dim,
            element_bytes=element_bytes,
            conversion_bytes=conversion_bytes(shape, element_bytes, storage),
        )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
