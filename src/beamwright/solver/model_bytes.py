"""Memory needs of one model in bytes: weights, KV, recurrent states and working memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from beamwright.models.shape import ModelShape
from beamwright.plan.blocks import attention_partial_bytes, choose_block_size
from beamwright.plan.costs import (
    CAPTURED_TOKENS,
    CHUNK_TOKENS,
    LARGE_TABLE_BYTES,
    WEIGHT_BUFFERS,
    ModelCosts,
    Storage,
    matmul_scratch_bytes,
    projection_bytes,
    weight_bytes,
)
from beamwright.sections import KVDtype

_PREFILL_TOKENS = 4096  # maximum number of tokens in a prefill batch
# Maximum size in tokens of a row's tail: its newest KV, which is not yet in blocks.
_TAIL_TOKENS = 256
_LEAST_TAIL_TOKENS = 16
# Assumed number of a tree's tokens per beam, where tokens that beams share count once.
_TOKENS_OF_A_ROW = 128


@dataclass(frozen=True)
class Offloaded:
    """Layers of one model that are not on the device (`models.offload`).

    numbers: the numbers of these layers.
    home_bytes: weights on the host or on disk. buffer_bytes: buffers on the device.
    pass_bytes: bytes that a pass of many rows copies to the device.
    """

    numbers: tuple[int, ...]
    home_bytes: int
    buffer_bytes: int
    pass_bytes: int


@dataclass(frozen=True)
class ModelBytes:
    """Memory needs of one model in a given dtype, in bytes.

    storage, kv_dtype: formats in which projection weights and KV are stored.
    scores: True for a verifier on a GPU. `activations` then cover scoring one step of every row in
        one call. On a CPU, `--memory` does not include this memory.
    parts: number of verifiers that run concurrently and share one copy of the weights
        (`--verifiers`). Each has its own part of the KV.
    offloaded: layers whose weights are not on the device; None: all weights are.
    """

    shape: ModelShape
    element_bytes: int
    storage: Storage = Storage.PLAIN
    kv_dtype: KVDtype = "auto"
    scores: bool = False
    parts: int = 1
    offloaded: Offloaded | None = None

    @property
    def costs(self) -> ModelCosts:
        """FLOPs and bytes of this model's passes, from which `plan.costs` estimates times."""
        costs = ModelCosts.of(self.shape, self.element_bytes, self.storage, self.kv_dtype)
        moved = 0 if self.offloaded is None else self.offloaded.pass_bytes
        return replace(costs, offloaded_bytes=moved)

    @property
    def all_weights(self) -> int:
        """Bytes of all weights, wherever they are."""
        return weight_bytes(self.shape, self.element_bytes, self.storage)

    @property
    def weights(self) -> int:
        """Bytes that the weights take on the device."""
        if self.offloaded is None:
            return self.all_weights
        return self.all_weights - self.offloaded.home_bytes + self.offloaded.buffer_bytes

    def with_offloaded(self, num_layers: int) -> ModelBytes:
        """Return this model with the weights of `num_layers` layers off the device.

        The layers are evenly spread. So a copy has the time of the resident layers between two
        offloaded ones to arrive. A large embedding table that is not the LM head leaves the device,
        too. A mixture of experts has all experts at home; the device also keeps as many of them as
        the other layers have.
        """
        if not num_layers:
            return replace(self, offloaded=None)
        layers, built = self.shape.layers, self.shape.built
        whole = projection_bytes(self.shape, self.element_bytes, self.storage)
        numbers = tuple(turn * layers // num_layers for turn in range(num_layers))
        if built is not None and built.experts:
            home = whole * built.experts // sum(map(prod, self.shape.matrices))
            passing = WEIGHT_BUFFERS * home // built.num_experts
            moved = home * num_layers // layers
            return replace(self, offloaded=Offloaded(numbers, home, home - moved + passing, moved))
        values = (built.by_layer if built is not None else ()) or (1,) * layers
        sizes = [whole * values[number] // sum(values) for number in numbers]
        buffers = [max(sizes[turn::WEIGHT_BUFFERS], default=0) for turn in range(WEIGHT_BUFFERS)]
        moved = sum(sizes)
        home = moved + self._table_bytes
        return replace(self, offloaded=Offloaded(numbers, home, sum(buffers), moved))

    @property
    def _table_bytes(self) -> int:
        """Bytes of an embedding table that leaves the device with the first layer; 0 if none.

        `all_weights` does not count the table of a file in blocks, whose rows stay in the file.
        """
        if self.shape.tied or self.shape.built is not None or self.storage is Storage.BLOCKS:
            return 0
        table = self.shape.vocab * self.shape.hidden * self.element_bytes
        return table if table >= LARGE_TABLE_BYTES else 0

    @property
    def kv_per_token(self) -> int:
        """Bytes of the KV of one token, as it is stored."""
        return self.shape.kv_bytes_per_token(self.element_bytes, self.kv_dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's recurrent states in all recurrent layers together."""
        return self.shape.state_bytes(self.element_bytes)

    @property
    def held_per_token(self) -> int:
        """Bytes that one token of a tree occupies: its KV and its share of a recurrent state."""
        return self.kv_per_token + self.state_bytes // _TOKENS_OF_A_ROW

    @property
    def read_per_token(self) -> int:
        """Bytes of the KV of one token as attention reads it, after dequantising."""
        return self.shape.kv_bytes_per_token(self.element_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of KV, equal for all groups of layers."""
        return choose_block_size(self._group_bytes)[0]

    @property
    def blocks(self) -> list[tuple[int, int | None]]:
        """For each group of layers: number of tokens per block, and attention window or None."""
        windows = [group.window for group in self.shape.kv_layer_groups]
        return list(zip(choose_block_size(self._group_bytes)[1], windows, strict=True))

    @property
    def cuda_graph_bytes(self) -> int:
        """Estimated bytes that captured CUDA graphs of forward passes hold permanently.

        Passes of a model with offloaded weights are not captured.
        """
        if self.offloaded is not None:
            return 0
        return CAPTURED_TOKENS * self.shape.prefill_width * self.element_bytes

    @property
    def _group_bytes(self) -> list[int]:
        """KV bytes of one token, for each group of layers."""
        groups = self.shape.kv_layer_groups
        return [group.bytes_per_token(self.element_bytes, self.kv_dtype) for group in groups]

    def tails(self, num_rows: int, step_tokens: int = _TAIL_TOKENS) -> int:
        """Return the bytes of the tails of `num_rows` rows: their newest KV, outside blocks.

        Two copies of the tails count, because both exist while rows are rearranged.

        step_tokens: maximum number of tokens of a step.
        """
        tokens = max(_LEAST_TAIL_TOKENS, 1 << (step_tokens - 1).bit_length())
        return num_rows * 2 * min(tokens, _TAIL_TOKENS) * self.read_per_token

    def partials(self, num_rows: int) -> int:
        """Return the bytes that attention kernels need for partial results of `num_rows` rows."""
        groups = self.shape.kv_layer_groups
        return num_rows * sum(
            attention_partial_bytes(self.shape.heads, group.head_dim) for group in groups
        )

    def activations(self, num_rows: int) -> int:
        """Return the estimated working memory of `num_rows` rows.

        The estimate is the larger of two needs: a decode step of these rows, and a prefill batch.
        """
        shape = self.shape
        decode = num_rows * shape.working_bytes_per_row(self.element_bytes)
        scratch = matmul_scratch_bytes(shape, self.storage)
        prefill = _PREFILL_TOKENS * shape.activation_width * self.element_bytes
        # A verifier prefills the steps of a round, and keeps their hidden states for its head.
        if self.scores:
            tokens = min(_PREFILL_TOKENS, num_rows * CHUNK_TOKENS)
            reading = tokens * shape.prefill_width * self.element_bytes
            prefill = max(prefill, reading, shape.logits_bytes(self.element_bytes))
            scratch += 2 * tokens * shape.hidden * self.element_bytes
        return max(decode, prefill) + scratch
