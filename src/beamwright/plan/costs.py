"""Cost model: a model's memory in bytes, and the seconds of its forward passes.

This package imports neither torch nor `models`, so a model's shape arrives through the protocol
`Shape`. Only the projections inside the layers are quantised. Embeddings, LM head, norms and biases
keep the model's precision. `models` makes the tensors whose sizes are computed here.

Seconds follow a roofline: the slower of memory traffic and compute, plus kernel launches. The peaks
are scaled by the shares in the hardware profile, which say how much of a peak real kernels reach.
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

# Tokens of one row in one prefill chunk. `models.prefill` says why the number is constant.
CHUNK_TOKENS = 256
# Maximum number of tokens of a prefill pass that is captured as a CUDA graph
# (`models.prefill_passes`).
CAPTURED_TOKENS = 1024
# Columns that share one scale and one zero point when Beamwright rounds weights to int4.
INT4_GROUP = 64
# Maximum number of weights dequantised at once where no kernel multiplies quantised weights
# directly.
GROUPED_TILE_VALUES = 1 << 22
# Maximum number of rows for which a GPU kernel reads quantised weights directly.
#
# For more rows, weights are dequantised first.
QUANTISED_GEMM_ROWS = 256
# Maximum number of weights dequantised at once for more than `QUANTISED_GEMM_ROWS` rows.
#
# In 16 bits, this many weights fit the L2 cache of a large GPU.
DEQUANTISED_VALUES = 1 << 24

# An embedding larger than this stays in its file, or on the host if layers are offloaded. Reading a
# row takes 1 us, much less than a pass.
LARGE_TABLE_BYTES = 1 << 26
# Buffers that offloaded layers take turns in (`models.offload`): one computes while the next one
# arrives.
WEIGHT_BUFFERS = 2

_INT8_SCALE_BYTES = 2 * 4  # a row's scale and, on a GPU, its lowest value, both in float32
# int8 weights in blocks (`Storage.BYTES`): columns that share a scale, and bytes of the scale.
_BLOCK_COLUMNS, _BLOCK_SCALE_BYTES = 32, 2
_INT4_SCALE_BYTES = 2 * 2  # a group's scale and lowest value, both in float16


class Shape(Protocol):
    """Interface of a model's architecture, as far as costs depend on it (`models.shape`).

    matrices: (rows, columns, count) of the projections inside the layers.
    packed: for a quantised checkpoint, bytes of its packed projections and number of projection
        weights that are not packed.
    blocks: for a checkpoint that can be kept in GGUF blocks, bytes of these blocks, number of
        weights outside them, and bytes of the LM head's blocks.
    """

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
    def blocks(self) -> tuple[int, int, int] | None: ...
    @property
    def kv_layer_groups(self) -> Sequence[Any]: ...
    @property
    def states(self) -> Sequence[Any]: ...
    def kv_bytes_per_token(self, element_bytes: int, kv_dtype: KVDtype = "auto", /) -> int: ...
    def state_bytes(self, element_bytes: int, /) -> int: ...


class Storage(StrEnum):
    """How projection weights are stored.

    INT8: int8 with a float32 scale per row.
    BYTES: int8 on a CPU, with a 16-bit scale per 32 columns. The LM head is stored likewise.
    INT4: two weights per byte, in groups that have a scale and a lowest value.
    STORED: the checkpoint's own groups of 4 or 8 bits; PLAIN if the checkpoint has none.
    BLOCKS: the blocks of a GGUF file, the LM head included (`models.native`).
    """

    PLAIN = "plain"
    INT8 = "int8"
    BYTES = "int8 in blocks"
    INT4 = "int4"
    STORED = "stored"
    BLOCKS = "blocks"

    @property
    def is_stored(self) -> bool:
        """True if projections stay in the format of the checkpoint file."""
        return self in (Storage.STORED, Storage.BLOCKS)


def storage_of(weights: str, *, is_packed: bool = False) -> Storage:
    """Return the storage format for a value of `--weights`; "auto" depends on the checkpoint.

    is_packed: True if the checkpoint is quantised.
    """
    if weights == "auto":
        return Storage.STORED if is_packed else Storage.PLAIN
    return Storage(weights)


def library_storage(storage: Storage, shape: Shape) -> Storage:
    """Return the format that replaces `storage` on a CPU with Beamwright's C library for GEMMs.

    The library multiplies with GGUF blocks and with int8 in blocks directly.
    """
    if storage is Storage.STORED and shape.blocks:
        return Storage.BLOCKS
    return Storage.BYTES if storage is Storage.INT8 else storage


def matrix_bytes(rows: int, columns: int, element_bytes: int, storage: Storage) -> int:
    """Return the bytes of one projection [rows, columns], its scales and zero points included."""
    if storage is Storage.PLAIN:
        return rows * columns * element_bytes
    if storage is Storage.INT8:
        return rows * (columns + _INT8_SCALE_BYTES)
    if storage is Storage.BYTES:
        return rows * (columns + -(-columns // _BLOCK_COLUMNS) * _BLOCK_SCALE_BYTES)
    return rows * -(-columns // INT4_GROUP) * (INT4_GROUP // 2 + _INT4_SCALE_BYTES)


def weight_bytes(shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN) -> int:
    """Return the bytes of all weights of a model.

    element_bytes: bytes of each weight that is not quantised.
    """
    if storage is Storage.PLAIN:
        return shape.num_parameters * element_bytes
    others = shape.num_parameters - sum(map(prod, shape.matrices))
    if storage is Storage.STORED:
        packed, plain = shape.packed or (0, 0)
        return packed + (others + plain) * element_bytes
    if storage is Storage.BLOCKS:
        tiles, plain, _ = shape.blocks or (0, 0, 0)
        return tiles + plain * element_bytes
    return others * element_bytes + projection_bytes(shape, element_bytes, storage)


def projection_bytes(shape: Shape, element_bytes: int, storage: Storage = Storage.PLAIN) -> int:
    """Return the bytes of all projections inside the layers, nearly all bytes of the layers."""
    values = sum(map(prod, shape.matrices))
    if storage is Storage.PLAIN:
        return values * element_bytes
    if storage is Storage.STORED:
        packed, plain = shape.packed or (0, 0)
        return packed + plain * element_bytes
    if storage is Storage.BLOCKS:
        tiles, _, head = shape.blocks or (0, 0, 0)
        return tiles - head
    return sum(
        count * matrix_bytes(rows, columns, element_bytes, storage)
        for rows, columns, count in shape.matrices
    )


def conversion_bytes(shape: Shape, element_bytes: int, storage: Storage) -> int:
    """Return the extra memory traffic of a pass that dequantises all projections first, in bytes.

    The dequantised weights are written once and read once. Reading the quantised weights is not
    included.
    """
    if storage in (Storage.PLAIN, Storage.BLOCKS, Storage.BYTES):
        return 0
    return 2 * sum(map(prod, shape.matrices)) * element_bytes


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def matmul_scratch_bytes(shape: Shape, storage: Storage = Storage.PLAIN) -> int:
    """Return the bytes of temporary memory for the largest matrix product with weights.

    Only dequantised weights count, not the product's input and output.
    """
    if storage in (Storage.PLAIN, Storage.BLOCKS, Storage.BYTES):
        return 0
    # Without a kernel, a tile exists three times: 4-bit codes as bytes, codes as floats, and the
    # floats with scale and zero point applied. A GPU with a kernel dequantises a piece to 16 bits.
    most = max(rows * _round_up(columns, INT4_GROUP) for rows, columns, _ in shape.matrices)
    tile = min(most, GROUPED_TILE_VALUES) * (1 + 4 + 4)
    return max(tile, min(most, DEQUANTISED_VALUES) * 2)


@dataclass(frozen=True)
class ModelCosts:
    """Sizes of one model in one precision, the input of `Roofline`.

    num_heads: number of query heads.
    active_parameters: parameters that one token is multiplied with (mixture of experts); None: all.
    conversion_bytes: extra memory traffic of a pass with more than `quantised_gemm_rows` tokens,
        which dequantises the weights first.
    windowed: (KV bytes per token, window in tokens) per group of sliding-window layers.
    recurrent_layers: number of layers that keep a recurrent state instead of KV.
    state_bytes: bytes of all recurrent states of one row; every pass reads and writes them.
    offloaded_bytes: bytes of weights that are not on the device; every pass copies them there.
    runs_in_library: True if the C library can multiply with these weights as they are stored. It
        computes a whole pass in one call.
    """

    num_layers: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    num_heads: int
    head_dim: int
    element_bytes: int
    conversion_bytes: int = 0
    quantised_gemm_rows: int = 0
    active_parameters: int | None = None
    windowed: tuple[tuple[int, int], ...] = ()
    recurrent_layers: int = 0
    state_bytes: int = 0
    offloaded_bytes: int = 0
    runs_in_library: bool = False

    def share_of_weights_read(self, num_tokens: int) -> float:
        """Return the fraction of the weights that a pass of `num_tokens` tokens reads.

        This is 1 for a dense model. Tokens are assumed to choose experts evenly.
        """
        used = (self.active_parameters or self.num_parameters) / self.num_parameters
        return 1 - (1 - used) ** num_tokens

    def weight_traffic_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that a pass of `num_tokens` tokens reads or dequantises."""
        extra_bytes = self.conversion_bytes if num_tokens > self.quantised_gemm_rows else 0
        return self.share_of_weights_read(num_tokens) * (self.weight_bytes + extra_bytes)

    def at_path_length(self, num_tokens: int, step_tokens: int) -> ModelCosts:
        """Return these costs with the mean KV bytes per token of a path of `num_tokens` tokens.

        The mean is smaller for long paths, because a sliding-window layer keeps at most its window
        plus one step of `step_tokens` tokens.
        """
        dropped_bytes = sum(
            size * max(0, num_tokens - window - step_tokens) for size, window in self.windowed
        )
        kept = self.kv_bytes_per_token - dropped_bytes // max(1, num_tokens)
        return replace(self, kv_bytes_per_token=kept, windowed=())

    @classmethod
    def of(
        cls,
        shape: Shape,
        element_bytes: int,
        storage: Storage = Storage.PLAIN,
        kv_dtype: KVDtype = "auto",
    ) -> ModelCosts:
        """Compute the costs of a model shape.

        element_bytes: bytes of a weight that `storage` does not quantise, and of a KV element if
            `kv_dtype` is "auto".
        """
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
            quantised_gemm_rows=QUANTISED_GEMM_ROWS if element_bytes == 2 else 0,
            active_parameters=None if active == shape.num_parameters else active,
            windowed=tuple(
                (group.bytes_per_token(element_bytes, kv_dtype), group.window)
                for group in shape.kv_layer_groups
                if group.window is not None
            ),
            recurrent_layers=len({part.layer for part in shape.states}),
            state_bytes=shape.state_bytes(element_bytes),
            runs_in_library=storage in (Storage.BLOCKS, Storage.BYTES, Storage.INT4),
        )


class Layout(StrEnum):
    """How attention reads KV.

    DENSE: a copy of the whole path per beam, as in the LBS paper.
    TREE: prefixes shared by several beams are read once.
    """

    DENSE = "dense"
    TREE = "tree"


Bound = Literal["bandwidth", "compute", "launches", "offloaded weights"]


@dataclass(frozen=True)
class Roofline:
    """Roofline model: predicted seconds of one model's passes and KV transfers on one machine."""

    model: ModelCosts
    hardware: HardwareProfile

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        """Return the seconds to prefill `num_tokens` tokens after `context` cached tokens."""
        visible = num_tokens * (context + (num_tokens + 1) / 2)
        chunks = -(-num_tokens // CHUNK_TOKENS)
        return self.decode_step_s(num_tokens, context + num_tokens, visible, num_states=chunks)

    def decode_step_s(
        self,
        num_rows: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout = Layout.TREE,
        num_states: int | None = None,
    ) -> float:
        """Return the seconds of one decode iteration: one token for each of `num_rows` rows.

        kv_tokens_read: tokens whose KV is read from memory: the distinct tokens of all paths if
            prefixes are read once, else the sum of the path lengths.
        kv_tokens_seen: the sum of the path lengths, which decides the attention's arithmetic.
        num_states: rows whose recurrent states are read and written; None: `num_rows`. A prefill
            sets it, because several of its tokens belong to one row.
        """
        memory_s, compute_s, launch_s = self.pass_parts_s(
            num_rows, kv_tokens_read, kv_tokens_seen, layout, num_states
        )
        return max(max(memory_s, compute_s) + launch_s, self.offload_s(num_rows))

    def offload_s(self, num_tokens: int) -> float:
        """Return the seconds in which a pass copies the offloaded weights that it needs."""
        needed = self.model.offloaded_bytes * self.model.share_of_weights_read(num_tokens)
        return self.transfer_s(needed, 0, Direction.H2D)

    def pass_costs(self) -> PassCosts:
        """Return the costs of a pass without reading KV; the scheduler adds that time."""
        rows, hardware = 64, self.hardware  # 64 rows use most of the experts
        weights_s, rows_s, launch_s = self.pass_parts_s(rows, 0, 0, Layout.TREE, num_states=0)
        bandwidth = hardware.h2d_bandwidth * hardware.link_share
        byte_s = 1 / (hardware.device_bandwidth * hardware.bandwidth_share)
        state_s = 2 * self.model.state_bytes * byte_s
        weights_s = max(weights_s, self.offload_s(rows))
        return PassCosts(weights_s, rows_s / rows, launch_s, bandwidth, byte_s, state_s)

    def transfer_s(self, num_bytes: float, num_pieces: float, direction: Direction) -> float:
        """Return the seconds to copy `num_bytes` over the link in `num_pieces` queued copies."""
        hardware = self.hardware
        to_device = direction is Direction.H2D
        bandwidth = hardware.h2d_bandwidth if to_device else hardware.d2h_bandwidth
        return num_bytes / (bandwidth * hardware.link_share) + num_pieces * hardware.copy_launch_s

    def move_kv_s(self, num_bytes: float, direction: Direction) -> float:
        """Return the seconds to copy `num_bytes` of KV over the link, with one copy per block."""
        num_pieces = num_bytes / (BLOCK_TOKENS * self.model.kv_bytes_per_token)
        return self.transfer_s(num_bytes, num_pieces, direction)

    def bottleneck(
        self,
        num_rows: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout = Layout.TREE,
    ) -> Bound:
        """Return the slowest part of a pass: bandwidth, compute, launches, or offloaded weights.

        The parameters are those of `decode_step_s`.
        """
        memory_s, compute_s, launch_s = self.pass_parts_s(
            num_rows, kv_tokens_read, kv_tokens_seen, layout
        )
        if self.offload_s(num_rows) > max(memory_s, compute_s) + launch_s:
            return "offloaded weights"
        if launch_s > max(memory_s, compute_s):
            return "launches"
        return "bandwidth" if memory_s >= compute_s else "compute"

    def pass_parts_s(
        self,
        num_tokens: int,
        kv_tokens_read: float,
        kv_tokens_seen: float,
        layout: Layout,
        num_states: int | None = None,
    ) -> tuple[float, float, float]:
        """Return the seconds of memory traffic, of compute and of launches of a forward pass.

        The pass takes the longer of the first two, plus the third. The parameters are those of
        `decode_step_s`.
        """
        model, hardware = self.model, self.hardware
        kv_share = hardware.copies_share if layout is Layout.DENSE else hardware.bandwidth_share
        states = 2 * (num_tokens if num_states is None else num_states)  # each is read and written
        reached = hardware.device_bandwidth * hardware.bandwidth_share
        weights_s = model.weight_traffic_bytes(num_tokens) / reached
        rate = hardware.flops * hardware.flops_share
        num_launches = model.num_layers * hardware.decode_ops_per_layer
        if model.runs_in_library and hardware.coded_flops and hardware.coded_bandwidth:
            weights_s = (
                model.share_of_weights_read(num_tokens)
                * model.weight_bytes
                / hardware.coded_bandwidth
            )
            rate, num_launches = hardware.coded_flops, 1
        kv_s = kv_tokens_read * model.kv_bytes_per_token / (hardware.device_bandwidth * kv_share)
        memory_s = weights_s + states * model.state_bytes / reached + kv_s
        attending = model.num_layers - model.recurrent_layers
        attention = 4 * attending * model.num_heads * model.head_dim * kv_tokens_seen
        active = model.active_parameters or model.num_parameters
        compute_s = (2 * active * num_tokens + attention) / rate
        return memory_s, compute_s, num_launches * hardware.launch_s
