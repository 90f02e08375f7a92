"""What engine, solver and verifiers ask of a decoder, and what all decoders share. No weights.

Tokens come packed: [tokens] with their positions; whose KV they see is the attention view's
business. Every matrix product gets a multiple of 8 rows (`padded_rows`), or 1, 2 or 4 where the
start-up self-test finds their bits the same, so that a row's bits do not depend on the batch it is
in; that is measured on CPUs (docs/concepts/sameness.md). With tiles of fixed size it holds on any
device whose operators do the same for the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.attention.protocols import AttentionView
from beamwright.kv.codes import hadamard, round_to_grid
from beamwright.models.shape import ModelShape
from beamwright.sections import KVDtype

ROW_MULTIPLE = 8
FEW_ROWS = 2
"""What one row is padded to where that gives the bits of 8. One alone often does not: see
`Linear.takes_one_row`."""
_CAPTURED_ROWS = (8, 16, 32, 64, 96, 128, 192)
_RUN = 2048  # rotary positions computed in one call: bits do not depend on when tables grow
TILE_ROWS = 64
"""Rows of a tile with `--deterministic`: the batches of a search of 64 beams fit one."""
Turns = Mapping[int, tuple[Tensor, float]]
"""By head_dim: the matrix, and what a product of two vectors that went through it is to be
multiplied by."""


def padded_rows(count: int, least: int = ROW_MULTIPLE) -> int:
    """`count` rounded up to a multiple of 8; below that to a power of two, and at least `least`."""
    if 0 < count < ROW_MULTIPLE:
        return max(least, 1 << (count - 1).bit_length())
    return max(ROW_MULTIPLE, -(-count // ROW_MULTIPLE) * ROW_MULTIPLE)


def captured_rows(count: int) -> int:
    """`count` rounded up to one of few numbers: each is a CUDA graph. From 64 on, what is added is
    at most a half, and below it a card computes as fast."""
    return next((rows for rows in _CAPTURED_ROWS if rows >= count), -(-count // 64) * 64)


def in_tiles(
    size: int | None, work: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """What `work` makes of rows [rows, ...], `size` at a time, zeros filling up the last tile.

    size: None for all of them at once, as they are.
    """
    if size is None:
        return work(*tensors)
    rows, found = tensors[0].shape[0], []
    for first in range(0, rows, size):
        tiles = [tensor[first : first + size] for tensor in tensors]
        missing = size - tiles[0].shape[0]
        if missing:
            zeros = [tile.new_zeros((missing, *tile.shape[1:])) for tile in tiles]
            tiles = [torch.cat(pair) for pair in zip(tiles, zeros, strict=True)]
        found.append(work(*(tile.contiguous() for tile in tiles)))
    if len(found) == 1:
        return tuple(part[:rows] for part in found[0])
    return tuple(torch.cat(parts)[:rows] for parts in zip(*found, strict=True))


@dataclass
class Linear:
    """A weight [out, in] and an optional bias [out].

    takes_one_row: it gives a single row the bits that it has among others.
    is_fixed: a row has the same bits at any batch, by construction.
    """

    weight: Tensor
    bias: Tensor | None = None
    takes_one_row: ClassVar[bool] = False
    is_fixed: ClassVar[bool] = False

    @property
    def form(self) -> tuple[object, ...]:
        """What decides which kernel multiplies it, beside its size: for a self-test of each."""
        return type(self), self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def unadded(self, x: Tensor) -> Tensor:
        """The product, or float32 [parts, rows, out] whose sum in order it is, behind rounding."""
        return self(x)

    def gated(self, x: Tensor, kind: str) -> Tensor | None:
        """activation(gate) * up of the product's halves, where one kernel makes it; None: not."""
        return None


def by_rows(
    work: Callable[[Tensor], Tensor], x: Tensor, tile_rows: int | None, least: int = ROW_MULTIPLE
) -> Tensor:
    """`work` on rows x [rows, width], padded so that a row's bits do not depend on the others.

    tile_rows: of a tile, see `Decoder`. least: see `padded_rows`.
    """
    rows = x.shape[0]
    if tile_rows is not None:
        return in_tiles(tile_rows, lambda tile: (work(tile),), x)[0]
    padded = padded_rows(rows, least)
    if padded == rows:
        return work(x)
    return work(torch.cat([x, x[:1].expand(padded - rows, -1)]))[:rows]


class Angles:
    """Tables of rotary cos and sin that grow with the longest path: for a whole context they can
    take 200 MB, of which most searches read little.

    cos, sin: [positions, head_dim]. The first half of sin is negated: a head's halves swap.

    reached: positions that the tables have from the start. Who captures steps asks for the whole
    context, because tables that grow are new tensors.
    """

    def __init__(
        self,
        inv_freq: tuple[float, ...],
        scale: float,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        reached: int = 0,
    ) -> None:
        # float32 angles in every precision but float64: what the checkpoints were trained with.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._freq = torch.tensor(inv_freq, dtype=torch.float32).to(wide)
        self._scale, self._context = scale, context
        self.cos = self.sin = torch.empty(0, 2 * len(inv_freq), dtype=dtype, device=device)
        self._grow(reached)

    def reach(self, last: int) -> bool:
        """Grow the tables to position `last` if they end before it; True if they did."""
        known = len(self.cos)
        if last >= known:
            self._grow(max(last + 1, 2 * known))
        return len(self.cos) > known

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, head_dim] of positions within reach."""
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


class RoundedView(AttentionView):
    """An attention view that gets keys and values in 8 bits as they will be read.

    They are rounded once, before anything has seen them: a decoded token, a prefilled one, tails
    and sealed segments are then read as the same numbers. Keys are turned by a Hadamard matrix
    first, and queries by the same, so that products stay: in a few dimensions keys are many times
    as large as in others, and those would set the scale of all.
    decoder: that it is for, see its `keep_kv`.
    """

    def __init__(self, view: AttentionView, decoder: Decoder) -> None:
        self._view, self._decoder = view, decoder
        self.looks_ahead, self.states = view.looks_ahead, view.states

    def foresee(self, layer: int, query: Tensor) -> None:
        """A query as `attend` will get it."""
        self._view.foresee(layer, self._asking(query))

    def attend(
        self, layer: int, query: Tensor, key_value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        both = torch.stack([self.turned(key_value[:, 0]), key_value[:, 1]], dim=1)
        fresh = round_to_grid(both, self._decoder.kv_dtype)
        context: Tensor = self._view.attend(layer, self._asking(query), fresh, sinks)
        return context

    def close(self) -> None:
        self._view.close()

    def turned(self, vectors: Tensor) -> Tensor:
        """Queries or keys [tokens, heads, head_dim], so that what is large in them is spread."""
        matrix, _ = self._decoder.turns[vectors.shape[-1]]
        flat = vectors.reshape(len(vectors), -1)  # a product's tile is of tokens, as everywhere
        turned = self._decoder.by_rows(
            lambda x: (x.reshape(-1, len(matrix)) @ matrix).view(x.shape), flat
        )
        return turned.view(vectors.shape)

    def _asking(self, query: Tensor) -> Tensor:
        """Turned queries whose products with turned keys are those of the plain ones."""
        return self.turned(query) * self._decoder.turns[query.shape[-1]][1]


class Decoder(Protocol):
    """The forward pass of a causal model. Stateless: KV lives in the view.

    tile_rows: everything but attention runs on so many rows at a time, padded with zeros, so that
        no library can choose another kernel for another batch; None: on the whole batch.
    least_rows: fewer are padded to so many; below 8 only where that was seen to give the same bits.
    dtype: of the weights that are not quantised, and of all computation. device: of the weights.
    kv_dtype: in what its keys and values are to be kept: it hands over no others, see `keep_kv`.
    """

    shape: ModelShape
    tile_rows: int | None
    least_rows: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: KVDtype = "auto"
    turns: Turns

    @property
    def takes_one_row(self) -> bool:
        """Whether all its products do, see `Linear`."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Whether rows have the same bits at any batch by construction, but for attention."""
        return False

    @property
    def steps_in_place(self) -> bool:
        """Whether kernels read and write the states of its recurrent layers in their blocks."""
        return False

    @property
    def kind(self) -> tuple[object, ...]:
        """What decoders have in common that run the same code on the same sizes."""

    def hidden(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None = None
    ) -> Tensor:
        """Final-normalised hidden states [tokens, hidden] of packed tokens.

        token_ids, positions: [tokens], a multiple of 8 (see `padded_rows`).
        read: the tokens that are wanted, as many as a multiple of 8; None for all.
        """
        if self.kv_dtype != "auto":
            view = RoundedView(view, self)
        return self.forward(token_ids, positions, view, read)

    def forward(
        self, token_ids: Tensor, positions: Tensor, view: AttentionView, read: Tensor | None
    ) -> Tensor:
        """What `hidden` says, with keys and values as they are computed."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocab] of hidden states; rows are padded to a multiple of 8 inside."""

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Rows [tokens, hidden] of the embedding table."""

    def first_layers(self) -> Decoder:
        """A truncated copy for self-tests: the first layer of each kind and form of products."""

    def keep_kv(self, kv_dtype: KVDtype) -> None:
        """Its keys and values are to be kept so from now on."""
        self.kv_dtype = kv_dtype
        made = {group.head_dim: hadamard(group.head_dim) for group in self.shape.kv_groups}
        self.turns = {
            size: (matrix.to(self.device, self.dtype), part)
            for size, (matrix, part) in made.items()
        }

    def by_rows(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`work` on rows x [rows, width], padded so that a row's bits do not depend on the others.

        For matrix products that are not the decoder's own, such as a verifier's head.
        """
        return by_rows(work, x, self.tile_rows, max(FEW_ROWS, self.least_rows))
