"""What a model costs on a machine: bytes in any precision, seconds of each operation. No torch.

`Shape` is a seam: the room of models is above, and its shapes fit by their attributes. Only the
projections inside the layers are quantised; embeddings, LM head, norms and biases keep the model's
precision; `models` makes the tensors whose sizes are counted here. Seconds are the slower of memory
and compute, plus launches: a floor that real kernels approach to the profile's shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any, Literal, Protocol

from beamwright.plan.machines import HardwareProfile, PassCosts
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.protocols import Direction
from beamwright.sections import KVDtype

CHUNK_TOKENS = 256
"""Tokens of a row that a prefill reads at a time: a constant, see `models.prefill`."""
CAPTURED_TOKENS = 1024
"""Most tokens of a prefill that is captured, see `models.packed`."""
INT4_GROUP = 64
"""Columns that share one scale and one zero point, where weights are rounded to int4 here."""
GROUPED_TILE_VALUES = 1 << 22
"""Most weights that are turned back into floating point at a time, where no kernel reads them."""
CODED_ROWS = 256
"""Up to so many rows a card's kernel reads codes as they are; of more, weights are turned back."""
CODED_VALUES = 1 << 24
"""Most weights that are turned back for that at a time: in 16 bits they fit a large card's L2."""

_INT8_ENDS = 2 * 4  # a row's scale, and on a card its lowest value
_BLOCK, _HALF = 32, 2  # columns of a block of int8, bytes of its scale
_INT4_ENDS = 2 * 2  # a group's scale and lowest value, in float16


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
    def active_parameters(self) -> int: ...
    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]: ...
    @property
    def packed(self) -> tuple[int, int] | None: ...
    @property
    def blocks(self) -> tuple[int, int] | None: ...
    @property
    def kv_groups(self) -> Sequence[Any]: ...
    @property
    def states(self) -> Sequence[Any]: ...
    def kv_bytes_per_token(self, element_bytes: int, kv_dtype: KVDtype = "auto", /) -> int: ...
    def state_bytes(self, element_bytes: int, /) -> int: ...


class Storage(StrEnum):
    """How a projection is kept.

    INT8: a float32 scale per row. BYTES: int8 on a CPU, with a scale in 16 bits per 32 columns, the
    LM head too. INT4: two weights per byte, in groups with a scale and a low.
    STORED: as a quantised checkpoint keeps it, where that is in groups of 4 or 8 bits; else plain.
    BLOCKS: as a GGUF file keeps it, and so is the LM head (`models.native`).
    """

    PLAIN = "plain"
    INT8 = "int8"
    BYTES = "int8 in blocks"
    INT4 = "int4"
    STORED = "stored"
    BLOCKS = "blocks"

    @property
    def is_stored(self) -> bool:
        """Whether projections stay as their file has them."""
        return self in (Storage.STORED, Storage.BLOCKS)


def storage_of(weights: str, *, is_packed: bool = False) -> Storage:
    """What `--weights` means. is_packed: the checkpoint is quantised."""
    if weights == "auto":
        return Storage.STORED if is_packed else Storage.PLAIN
    return Storage(weights)


def in_library(storage: Storage, shape: Shape) -> Storage:
    """How the same weights are kept on a CPU that has the C library of products."""
    if storage is Storage.STORED and shape.blocks:
        return Storage.BLOCKS
    return Storage.BYTES if storage is Storage.INT8 else storage


def matrix_bytes(rows: int, columns: int, element_bytes: int, storage: Storage) -> int:
    """Bytes of one projection [rows, columns], its scales and zero points included."""
    if storage is Storage.PLAIN:
        return rows * columns * element_bytes
    if storage is Storage.INT8:
        return rows * (columns + _INT8_ENDS)
    if storage is Storage.BYTES:
        return rows * (columns + -(-columns // _BLOCK) * _HALF)
    return rows * -(-columns // INT4_GROUP) * (INT4_GROUP // 2 + _INT4_ENDS)


def weight_bytes(shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN) -> int:
    """Bytes of all weights of a model. element_bytes: of what is not quantised."""
    if storage is Storage.PLAIN:
        return shape.num_parameters * element_bytes
    others = shape.num_parameters - sum(map(prod, shape.matrices))
    if storage is Storage.STORED:
        packed, plain = shape.packed or (0, 0)
        return packed + (others + plain) * element_bytes
    if storage is Storage.BLOCKS:
        tiles, plain = shape.blocks or (0, 0)
        return tiles + plain * element_bytes
    quantised = sum(
        count * matrix_bytes(rows, columns, element_bytes, storage)
        for rows, columns, count in shape.matrices
    )
    return others * element_bytes + quantised


def conversion_bytes(shape: Shape, element_bytes: int, storage: Storage) -> int:
    """Memory traffic of one forward pass for turning weights back into floating point.

    They are written and read again, beside being read as they are stored.
    """
    if storage in (Storage.PLAIN, Storage.BLOCKS, Storage.BYTES):
        return 0
    return 2 * sum(map(prod, shape.matrices)) * element_bytes


def product_scratch_bytes(shape: Shape, storage: Storage = Storage.PLAIN) -> int:
    """Working memory of the largest product, beside its input and output."""
    if storage in (Storage.PLAIN, Storage.BLOCKS, Storage.BYTES):
        return 0
    # A tile's nibbles as bytes, as floating point, and with scale and zero point; or a card's piece
    # in 16 bits.
    most = max(rows * _up(columns, INT4_GROUP) for rows, columns, _ in shape.matrices)
    tile = min(most, GROUPED_TILE_VALUES) * (1 + 4 + 4)
    return max(tile, min(most, CODED_VALUES) * 2)


@dataclass(frozen=True)
class ModelCosts:
    """Sizes of one model in one precision. num_heads: query heads.

    active_parameters: those that one token is multiplied with; None: all. A batch reads the weights
    of idle ones as far as its tokens take other experts.

    conversion_bytes: memory traffic of a forward pass beyond reading the weights as they are
    stored, where they are turned back into floating point first: with more tokens than coded_rows.
    windowed: KV bytes per token of
    layers that see a window, and that window. recurrent_layers: those that keep no KV, and of a row
    `state_bytes` together, which every pass reads and writes. in_library: the C library,
    where a machine has it, multiplies these weights as they are, a whole pass in one call.
    """

    num_layers: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    num_heads: int
    head_dim: int
    element_bytes: int
    conversion_bytes: int = 0
    coded_rows: int = 0
    active_parameters: int | None = None
    windowed: tuple[tuple[int, int], ...] = ()
    recurrent_layers: int = 0
    state_bytes: int = 0
    in_library: bool = False

    def share_read(self, num_tokens: int) -> float:
        """How much of the weights a pass of so many tokens reads, if experts are taken evenly."""
        used = (self.active_parameters or self.num_parameters) / self.num_parameters
        return 1 - (1 - used) ** num_tokens

    def read_bytes(self, num_tokens: int) -> float:
        """Memory traffic of a pass of so many tokens for weights."""
        turned_back = self.conversion_bytes if num_tokens > self.coded_rows else 0
        return self.share_read(num_tokens) * (self.weight_bytes + turned_back)

    def on_paths(self, num_tokens: int, step_tokens: int) -> ModelCosts:
        """With the KV per token of a path of so many: of layers that see a window, what it reaches,
        and a step."""
        left_out = sum(
            size * max(0, num_tokens - window - step_tokens) for size, window in self.windowed
        )
        kept = self.kv_bytes_per_token - left_out // max(1, num_tokens)
        return replace(self, kv_bytes_per_token=kept, windowed=())

    @classmethod
    def of(
        cls,
        shape: Shape,
        element_bytes: int,
        storage: Storage = Storage.PLAIN,
        kv_dtype: KVDtype = "auto",
    ) -> ModelCosts:
        """The costs of a shape whose KV, but for `kv_dtype`, and weights, but for `storage`, take
        `element_bytes`. In 16 bits kernels read few rows' weights as they are stored."""
        active = shape.active_parameters
        return cls(
            num_layers=shape.layers,
            num_parameters=shape.num_parameters,
            weight_bytes=weight_bytes(shape, element_bytes, storage),
            kv_bytes_per_token=shape.kv_bytes_per_token(element_bytes, kv_dtype),
            num_heads=shape.heads,
            head_dim=shape.head_dim,
            element_bytes=element_bytes,
            conversion_bytes=conversion_bytes(shape, element_bytes, storage),
            coded_rows=CODED_ROWS if element_bytes == 2 else 0,
            active_parameters=None if active == shape.num_parameters else active,
            windowed=tuple(
                (group.bytes_per_token(element_bytes, kv_dtype), group.window)
                for group in shape.kv_groups
                if group.window is not None
            ),
            recurrent_layers=len({part.layer for part in shape.states}),
            state_bytes=shape.state_bytes(element_bytes),
            in_library=storage in (Storage.BLOCKS, Storage.BYTES, Storage.INT4),
        )


def group_blocks(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Bytes of a block of KV, and tokens in it of each group of layers.

    sizes: bytes per token of each group. Blocks of all groups have equally many bytes, of which as
    few as can be are left over where tokens are powers of two, as kernels want them; of equals,
    those that hold nearest to eight tokens.
    """

    def tokens(block_bytes: int) -> list[int]:
        return [1 << ((block_bytes // size).bit_length() - 1) for size in sizes]

    def costs(block_bytes: int) -> tuple[float, float]:
        counts = tokens(block_bytes)
        per_token = sum(block_bytes / count for count in counts)
        return per_token, abs(sum(counts) / len(counts) - BLOCK_TOKENS)

    wanted = {size * BLOCK_TOKENS // part for size in sizes for part in (1, 2)}
    best = min((size for size in sorted(wanted) if size >= max(sizes)), key=costs)
    return best, tokens(best)


ROW_PARTS = 32
"""Of a row's path of 4,096 tokens, in the kernels; of each there is a partial result."""


def partial_bytes(heads: int, head_dim: int) -> int:
    """Bytes of a row's partial results in the kernels, in one group of layers: its own tokens' and
    those of its path's parts, context and log-sum-exp in float32; one layer at a time."""
    return (ROW_PARTS + 1) * heads * (head_dim + 1) * 4


def record_bytes(size: Sequence[int], element_bytes: int) -> int:
    """Bytes of a tensor of a state in a flat record of several: each begins at whole 16 bytes."""
    return _up(prod(size) * element_bytes, 16)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class Layout(StrEnum):
    """How attention reads KV: a copy per beam (the LBS paper's layout), or shared parts once."""

    DENSE = "dense"
    TREE = "tree"


Bound = Literal["bandwidth", "compute", "launches"]


@dataclass(frozen=True)
class Roofline:
    """Costs of one model on one machine."""

    model: ModelCosts
    hardware: HardwareProfile

    def prefill(self, num_tokens: int, context: int = 0) -> float:
        """Seconds to encode `num_tokens` behind `context` tokens that are there already."""
        visible = num_tokens * (context + (num_tokens + 1) / 2)
        chunks = -(-num_tokens // CHUNK_TOKENS)
        return self.decode_step(num_tokens, context + num_tokens, visible, num_states=chunks)

    def decode_step(
        self,
        num_rows: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout = Layout.TREE,
        num_states: int | None = None,
    ) -> float:
        """Seconds of one token for each of `num_rows` beams of one group; weights are read once.

        kv_tokens_read: the union of the paths where shared parts are read once, else their sum.
        kv_tokens_seen: the sum of the paths, which is what the rows attend to either way.
        num_states: rows whose states are read and written, where several tokens are of one row.
        """
        memory_s, compute_s, launch_s = self.parts(
            num_rows, kv_tokens_read, kv_tokens_seen, layout, num_states
        )
        return max(memory_s, compute_s) + launch_s

    def pass_costs(self) -> PassCosts:
        """What a schedule may know; KV is left out."""
        rows, hardware = 64, self.hardware  # that take most experts
        weights_s, rows_s, launch_s = self.parts(rows, 0, 0, Layout.TREE, num_states=0)
        bandwidth = hardware.h2d_bandwidth * hardware.link_share
        byte_s = 1 / (hardware.device_bandwidth * hardware.bandwidth_share)
        state_s = 2 * self.model.state_bytes * byte_s
        return PassCosts(weights_s, rows_s / rows, launch_s, bandwidth, byte_s, state_s)

    def transfer(self, num_bytes: float, num_pieces: float, direction: Direction) -> float:
        """Seconds to move bytes across the link in that many queued copies."""
        hardware = self.hardware
        to_device = direction is Direction.H2D
        bandwidth = hardware.h2d_bandwidth if to_device else hardware.d2h_bandwidth
        return num_bytes / (bandwidth * hardware.link_share) + num_pieces * hardware.copy_launch_s

    def move(self, num_bytes: float, direction: Direction) -> float:
        """The same in blocks of KV."""
        num_pieces = num_bytes / (BLOCK_TOKENS * self.model.kv_bytes_per_token)
        return self.transfer(num_bytes, num_pieces, direction)

    def bound(
        self,
        num_rows: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout = Layout.TREE,
    ) -> Bound:
        """What a decode step, or a prefill of so many tokens, mostly waits for."""
        memory_s, compute_s, launch_s = self.parts(num_rows, kv_tokens_read, kv_tokens_seen, layout)
        if launch_s > max(memory_s, compute_s):
            return "launches"
        return "bandwidth" if memory_s >= compute_s else "compute"

    def parts(
        self,
        num_tokens: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout,
        num_states: int | None = None,
    ) -> tuple[float, float, float]:
        """Seconds of a forward pass by memory, by compute, and of launches; see `decode_step`.

        The pass takes the longer of the first two, and the third.
        """
        model, hardware = self.model, self.hardware
        kv_share = hardware.copies_share if layout is Layout.DENSE else hardware.bandwidth_share
        states = 2 * (num_tokens if num_states is None else num_states)  # read, and written
        reached = hardware.device_bandwidth * hardware.bandwidth_share
        weights_s = model.read_bytes(num_tokens) / reached
        rate = hardware.flops * hardware.flops_share
        num_launches = model.num_layers * hardware.decode_ops_per_layer
        if model.in_library and hardware.coded_flops and hardware.coded_bandwidth:
            weights_s = model.share_read(num_tokens) * model.weight_bytes / hardware.coded_bandwidth
            rate, num_launches = hardware.coded_flops, 1
        kv_s = kv_tokens_read * model.kv_bytes_per_token / (hardware.device_bandwidth * kv_share)
        memory_s = weights_s + states * model.state_bytes / reached + kv_s
        attending = model.num_layers - model.recurrent_layers
        attention = 4 * attending * model.num_heads * model.head_dim * kv_tokens_seen
        active = model.active_parameters or model.num_parameters
        compute_s = (2 * active * num_tokens + attention) / rate
        return memory_s, compute_s, num_launches * hardware.launch_s
