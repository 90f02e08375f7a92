"""The `Decoder` interface that engine, solver and verifiers use, and code that all decoders share.

This module holds no weights. Tokens are packed: one sequence [tokens] with a position per token.
The attention view decides which KV each token attends to.

Results are batch-invariant: a row is bitwise equal in every batch. To this end every matrix product
gets a multiple of 8 rows (`padded_rows`), or 1, 2 or 4 rows where the start-up self-test finds the
results bitwise equal. That this suffices was measured on CPUs (docs/concepts/sameness.md). With
tiles of a fixed number of rows, results are batch-invariant on any device whose operators are
deterministic for a given shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.protocols import AttentionView
from beamwright.kv.codes import hadamard_matrix, round_to_grid
from beamwright.models.shape import ModelShape
from beamwright.sections import KVDtype

if TYPE_CHECKING:
    from beamwright.models.offload import WeightOffload

ROW_MULTIPLE = 8
# A single row is padded to this number where products of 2 rows and 8 rows are bitwise equal.
#
# A product with 1 row often differs: see `Linear.is_exact_for_one_row`.
FEW_ROWS = 2
_CAPTURED_ROWS = (8, 16, 32, 64, 96, 128, 192)
_RUN = 2048  # positions computed at once; fixed, so that values do not depend on how tables grow
# Rows of a tile with `--deterministic`. One tile holds the batch of a search with 64 beams.
TILE_ROWS = 64
# For each head_dim, the Hadamard rotation of queries and keys (`kv.codes.hadamard_matrix`).
#
# A rotation is a matrix, and the factor by which a product of two rotated vectors must be
# multiplied.
Rotations = Mapping[int, tuple[Tensor, float]]


def padded_rows(count: int, least: int = ROW_MULTIPLE) -> int:
    """Round `count` rows up to a multiple of 8, or below 8 to a power of two, at least `least`.

    0 becomes 8.
    """
    if 0 < count < ROW_MULTIPLE:
        return max(least, 1 << (count - 1).bit_length())
    return max(ROW_MULTIPLE, -(-count // ROW_MULTIPLE) * ROW_MULTIPLE)


def pad_for_cuda_graph(count: int) -> int:
    """Round `count` up to a number of rows for which a CUDA graph is captured.

    There are few such numbers, because each one needs a graph. Above 64 the padding is at most half
    of `count`. Below 64 the padding costs a GPU no time.
    """
    return next((rows for rows in _CAPTURED_ROWS if rows >= count), -(-count // 64) * 64)


def apply_in_tiles(
    size: int | None, work: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Apply `work` to tensors [rows, ...], `size` rows at a time, and return the joined results.

    Zeros fill up the last tile. If `size` is None, `work` gets all rows at once, without padding.
    """
    if size is None:
        return work(*tensors)
    rows, outputs = tensors[0].shape[0], []
    for first in range(0, rows, size):
        tiles = [tensor[first : first + size] for tensor in tensors]
        missing = size - tiles[0].shape[0]
        if missing:
            zeros = [tile.new_zeros((missing, *tile.shape[1:])) for tile in tiles]
            tiles = [torch.cat(pair) for pair in zip(tiles, zeros, strict=True)]
        outputs.append(work(*(tile.contiguous() for tile in tiles)))
    if len(outputs) == 1:
        return tuple(part[:rows] for part in outputs[0])
    return tuple(torch.cat(parts)[:rows] for parts in zip(*outputs, strict=True))


@dataclass
class Linear:
    """A projection: a weight [out, in] and an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None = None
    # True if a row computed alone is bitwise equal to the same row computed in a batch.
    is_exact_for_one_row: ClassVar[bool] = False
    # True if the product is batch-invariant by construction, for any number of rows.
    is_batch_invariant: ClassVar[bool] = False

    @property
    def kernel_key(self) -> tuple[object, ...]:
        """The properties that select the kernel, apart from the size.

        The start-up self-test tries one layer with each form.
        """
        return type(self), self.weight.dtype

    @property
    def stored(self) -> list[Tensor]:
        """The tensors of the weight, without the bias."""
        return [self.weight]

    def place_stored(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors of `stored` by others of the same sizes, in the same order.

        Layers whose weights do not stay on the device are views of a buffer (`models.offload`).
        """
        (self.weight,) = tensors

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def partial_sums(self, x: Tensor) -> Tensor:
        """Return the product [rows, out], or float32 partial sums [parts, rows, out].

        The caller adds the parts in order and rounds the sum to the dtype of `x`. A kernel that
        reads the product anyway, such as a norm, saves a pass over memory in this way.
        """
        return self(x)

    def gated(self, x: Tensor, kind: str) -> Tensor | None:
        """Return activation(gate) * up [rows, out / 2]; gate and up are halves of the product.

        kind: the activation's name. None: no single kernel computes this.
        """
        return None


def apply_padded(
    work: Callable[[Tensor], Tensor], x: Tensor, tile_rows: int | None, least: int = ROW_MULTIPLE
) -> Tensor:
    """Apply `work` to rows x [rows, width], padded so that the result is batch-invariant.

    tile_rows: number of rows of a tile, see `Decoder`. least: see `padded_rows`.
    """
    rows = x.shape[0]
    if tile_rows is not None:
        return apply_in_tiles(tile_rows, lambda tile: (work(tile),), x)[0]
    padded = padded_rows(rows, least)
    if padded == rows:
        return work(x)
    return work(torch.cat([x, x[:1].expand(padded - rows, -1)]))[:rows]


class RotaryTables:
    """Tables of rotary cos and sin, which grow with the longest path.

    Tables for a whole context can take 200 MB, and most searches read a small part of them.

    cos, sin: [positions, head_dim]. The first half of sin is negated, so that a rotation is
        x * cos + swapped * sin, where `swapped` is x with its two halves exchanged.
    num_positions: positions to compute at once. Code that captures CUDA graphs asks for the whole
        context, because growing replaces the tensors.
    """

    def __init__(
        self,
        inv_freq: tuple[float, ...],
        scale: float,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_positions: int = 0,
    ) -> None:
        # Checkpoints are trained with float32 angles, so only a float64 model has float64 angles.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._freq = torch.tensor(inv_freq, dtype=torch.float32).to(wide)
        self._scale, self._context = scale, context
        self.cos = self.sin = torch.empty(0, 2 * len(inv_freq), dtype=dtype, device=device)
        self._grow(num_positions)

    def extend_to(self, last: int) -> bool:
        """Extend the tables to position `last` if needed, and return whether they were extended."""
        known = len(self.cos)
        if last >= known:
            self._grow(max(last + 1, 2 * known))
        return len(self.cos) > known

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, 1, head_dim] of `positions` that the tables contain."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def _grow(self, count: int) -> None:
        tables = [(self.cos, self.sin)]
        for first in range(len(self.cos), min(count, self._context), _RUN):
            run = torch.arange(first, min(first + _RUN, self._context)).to(self._freq.dtype)
            angles = torch.outer(run, self._freq)
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
            both = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
            tables.append((both[0].to(self.cos), both[1].to(self.sin)))
        self.cos, self.sin = map(torch.cat, zip(*tables, strict=True))


class QuantisingView(AttentionView):
    """An attention view that rounds keys and values to the 8-bit numbers that will be stored.

    Keys and values are rounded once, before attention reads them. So attention reads the same
    numbers from a row's newest tokens (its tail) as later from stored blocks.

    Keys are first rotated by a Hadamard matrix. In a few dimensions keys are many times as large as
    in the rest, and these dimensions would set the scale of the whole vector. Queries are rotated
    by the same matrix, so that scores do not change.

    view: the view that stores KV and computes attention.
    decoder: the decoder that uses this view and has the rotations, see `Decoder.set_kv_dtype`.
    """

    def __init__(self, view: AttentionView, decoder: Decoder) -> None:
        self._view, self._decoder = view, decoder
        self.looks_ahead, self.states = view.looks_ahead, view.states

    def foresee(self, layer: int, query: Tensor) -> None:
        """Give the view an estimate of a layer's query before the layer runs, to load KV early.

        The estimate is rotated as `attend` rotates the final query.
        """
        self._view.foresee(layer, self._rotate_query(query))

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        both = torch.stack([self.rotate(key_value[:, 0]), key_value[:, 1]], dim=1)
        fresh = round_to_grid(both, self._decoder.kv_dtype)
        context: Tensor = self._view.attend(layer, self._rotate_query(query), fresh, sinks)
        return context

    def close(self) -> None:
        self._view.close()

    def rotate(self, vectors: Tensor) -> Tensor:
        """Rotate queries or keys [tokens, heads, head_dim], which spreads their large values."""
        matrix, _ = self._decoder.rotations[vectors.shape[-1]]
        flat = vectors.reshape(len(vectors), -1)  # one row per token: tiles consist of tokens
        rotated = self._decoder.apply_padded(
            lambda x: (x.reshape(-1, len(matrix)) @ matrix).view(x.shape), flat
        )
        return rotated.view(vectors.shape)

    def _rotate_query(self, query: Tensor) -> Tensor:
        """Rotate and scale a query, so that its scores with rotated keys are the same as before."""
        return self.rotate(query) * self._decoder.rotations[query.shape[-1]][1]


class Decoder(Protocol):
    """The forward pass of a causal model. A decoder has no state: the attention view holds KV."""

    shape: ModelShape
    # Rows of a tile: everything except attention is called with this many rows, padded with zeros.
    #
    # With a fixed number of rows a library cannot choose another kernel for another batch. None:
    # each call gets the whole batch.
    tile_rows: int | None
    # Minimum number of rows to which a pass is padded.
    #
    # The minimum is below 8 only where the start-up self-test found the results bitwise equal.
    least_rows: int
    # The dtype of the weights that are not quantised, and of the computation.
    dtype: torch.dtype
    # The device of the weights.
    device: torch.device
    # The format in which keys and values are stored, see `set_kv_dtype`.
    #
    # The decoder rounds keys and values to this format before it passes them to the view.
    kv_dtype: KVDtype = "auto"
    rotations: Rotations
    # Brings the weights of layers that do not stay on the device; None: all layers stay.
    offload: WeightOffload | None = None

    @property
    def is_exact_for_one_row(self) -> bool:
        """Whether `Linear.is_exact_for_one_row` holds for every product of the decoder."""
        return False

    @property
    def is_batch_invariant(self) -> bool:
        """Whether everything except attention is batch-invariant by construction."""
        return False

    @property
    def updates_states_in_place(self) -> bool:
        """Whether kernels read and write the states of all recurrent layers in their blocks."""
        return False

    @property
    def self_test_key(self) -> tuple[object, ...]:
        """A key for self-test results: equal for decoders that run the same code on equal sizes."""

    def hidden(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [tokens, hidden] of packed tokens, after the final norm.

        token_ids, positions: [tokens]; the caller pads them to a number that `padded_rows` returns.
        read: the indices of the tokens whose hidden states are returned, padded in the same way;
            None: all tokens.
        """
        if self.kv_dtype != "auto":
            view = QuantisingView(view, self)
        return self.forward(token_ids, positions, view, read)

    def forward(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None
    ) -> Tensor:
        """Compute what `hidden` returns. Keys and values are passed to `view` unrounded."""

    def begin_pass(self) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context manager for one forward pass.

        It gives a function to call with each layer's number before the layer runs.
        """
        if self.offload is None:
            return nullcontext(lambda number: None)
        return self.offload.one_pass()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [tokens, vocab] of `hidden` [tokens, hidden], which need no padding."""

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the rows [tokens, hidden] of the embedding table for `token_ids`."""

    def first_layers(self) -> Decoder:
        """Return a copy for self-tests, which keeps one layer of each kind and weight format."""

    def set_kv_dtype(self, kv_dtype: KVDtype) -> None:
        """Set the format in which keys and values are stored, and make its rotations."""
        self.kv_dtype = kv_dtype
        made = {
            group.head_dim: hadamard_matrix(group.head_dim) for group in self.shape.kv_layer_groups
        }
        self.rotations = {
            size: (matrix.to(self.device, self.dtype), part)
            for size, (matrix, part) in made.items()
        }

    def apply_padded(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply `work` to rows x [rows, width], padded so that the result is batch-invariant.

        Code outside the decoder, such as a verifier's head, uses it for matrix products.
        """
        return apply_padded(work, x, self.tile_rows, max(FEW_ROWS, self.least_rows))
