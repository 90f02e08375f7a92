"""The tail (KV of the current step) of layer-wise offloading: streamed layers are on the host.

On either side a layer's tokens are contiguous, [token, row, 2, kv_head, head_dim]: one copy stores
a token, and one copy loads all of them. Rows that only pad the batch have no KV of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from beamwright.kv.link import Transfer
from beamwright.kv.streams import Piece
from beamwright.kv.tails import padded_tail
from beamwright.protocols import Direction
from beamwright.sparse.host import HostedStore

NUM_BUFFERS = 2


@dataclass
class Placement:
    """Where the layers are and which rows run, for the token being computed.

    resident: layers [0, resident) stay on the device. buffers: for each fetched other layer, the
    number of its stream buffer. rows: original numbers of the batch's rows; the first `num_real`
    have KV of their own, the others pad the batch. storing: transfers to the host that the next
    token's compute must wait for.
    """

    resident: int
    rows: list[int]
    num_real: int
    buffers: dict[int, int] = field(default_factory=dict)
    storing: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True)
class LayeredTokens:
    """A row's new tokens, split into the layers on the device and those on the host.

    on_device: [tokens, resident layers, 2, kv_heads, head_dim] on the device.
    on_host: the other layers on the host, behind `num_before` older tokens of the row.
    """

    on_device: torch.Tensor
    on_host: torch.Tensor
    num_before: int

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens."""
        return self.on_device.shape[0]


def stack_layers(
    layers: list[torch.Tensor], size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Stack layers [tokens, ...] to [tokens, layers, ...]; without any, return zeros of `size`."""
    return torch.stack(layers, dim=1) if layers else torch.zeros(size, dtype=dtype)


class LayeredTail:
    """A `Tail` whose rows are equally long.

    Reads are padded and masked as in `RowTails`, so that sums are added in the same order. The
    memory doubles when full, up to a constant of the attention backend: the order of partial sums
    must not depend on the memory budget. In a streamed layer, a new token is written to the stream
    buffer first.

    length: tokens that every row holds. resident: layers [0, resident) are on the device.
    left: some layers have been written back since the tail was empty. num_real: rows that have KV
    of their own.
    """

    num_moves = 0  # no step is captured

    def __init__(self, store: HostedStore, capacity: int) -> None:
        self.layout, self.capacity = store.kv.layout, capacity
        self._scratch, self._device, self._link = store.scratch, store.compute_device, store.link
        self._token = (2, self.layout.num_kv_heads, self.layout.head_dim)
        self._token_bytes = self.layout.bytes_per_token // self.layout.num_layers
        self._counted = 0
        self.close()

    def close(self) -> None:
        """Drop all rows and free the memory."""
        self.num_rows = self.num_real = self.length = 0
        self.resident, self.left = self.layout.num_layers, False
        self.num_tokens = min(padded_tail(1, self.layout.head_dim), self.capacity)
        self._writing_back: list[Transfer] = []
        self._on_device: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, torch.Tensor] = {}
        self._host_from: list[int] = []  # per token, the first layer from which the host has it
        self._masked: tuple[tuple[int, ...], torch.Tensor] = (), torch.empty(0)
        self.open(Placement(self.resident, [], 0))
        self._measure()

    release = close

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the layers on the device."""
        return sum(held.nbytes for held in self._on_device.values())

    @property
    def places(self) -> torch.Tensor:
        return torch.full((self.num_rows,), self.length, device=self._device)

    @property
    def mask(self) -> torch.Tensor:
        """Return the additive mask [rows, 1, 1, tokens], made once per token."""
        now = self.num_rows, self.num_tokens, self.length
        if self._masked[0] != now:
            hidden = torch.full((self.num_tokens,), -torch.inf, device=self._device)
            hidden[: self.length + 1] = 0
            self._masked = now, hidden.to(self.layout.dtype).expand(self.num_rows, 1, 1, -1)
        return self._masked[1]

    # --- a view reads and writes -------------------------------------------------------------

    def open(self, placement: Placement) -> None:
        """Start a view. placement: where its layers are, kept up to date by the view."""
        self._placement = placement
        self._buffers: list[torch.Tensor] = []

    def open_buffers(self) -> None:
        """Allocate two stream buffers of the tail's current size."""
        if not self._buffers or self._buffers[0].shape[:2] != (self.num_tokens, self.num_real):
            self._buffers = [self._fresh(on_host=False) for _ in range(NUM_BUFFERS)]

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Write the current token; if the layer is streamed, store it to the host meanwhile."""
        placement, step = self._placement, self.length
        if layer == 0:
            self._host_from[step:] = [placement.resident]
            self.resident = placement.resident
        own = key_value[: self.num_real].contiguous()
        self._held(layer)[step] = own
        if layer >= placement.resident:
            piece = Piece(self._layer(layer, on_host=True)[step], own, len(own) * self._token_bytes)
            stored = self._link.submit(Direction.D2H, "store", [piece])
            placement.storing.append(stored)
            self._writing_back.append(stored)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [rows, kv_heads, tokens, head_dim]; padding rows repeat row 0."""
        held = self._held(layer)
        padding = self.num_rows - self.num_real
        if padding:
            held = torch.cat([held, held[:, :1].expand(-1, padding, -1, -1, -1)], dim=1)
        both = held.permute(2, 1, 3, 0, 4)
        return both[0], both[1]

    def own_tokens(self, layer: int) -> torch.Tensor:
        """Return the tokens before the current one: [tokens, real rows, 2, kv_heads, head_dim]."""
        return self._held(layer)[: self.length]

    def _held(self, layer: int) -> torch.Tensor:
        """Return the device memory of a layer, [token, row, 2, kv_head, head_dim]."""
        if layer < self._placement.resident:
            return self._layer(layer)
        return self._buffers[self._placement.buffers[layer]]

    def _layer(self, layer: int, *, on_host: bool = False) -> torch.Tensor:
        """Return a layer's memory on the device or the host, which is allocated at first use."""
        held = self._on_host if on_host else self._on_device
        if layer not in held:
            held[layer] = self._fresh(on_host=on_host)
            self._measure()
        return held[layer]

    # --- what crosses the link ---------------------------------------------------------------

    def fetched_pieces(self, layer: int, buffer: int | None = None) -> list[Piece]:
        """Return the pieces that load a layer. buffer: a stream buffer; None if it is to stay."""
        destination = self._layer(layer) if buffer is None else self._buffers[buffer]
        return self._pieces(destination, self._layer(layer, on_host=True), 0)

    def leaving_pieces(self, resident: int) -> Iterator[tuple[int, list[Piece]]]:
        """Yield (layer, pieces) that store what the host lacks of the layers from `resident` on.

        Once the iterator is used up, all of it counts as stored.
        """
        for layer in range(resident, max(self._host_from, default=0)):
            first = next(i for i, since in enumerate(self._host_from) if since > layer)
            pieces = self._pieces(self._layer(layer, on_host=True), self._layer(layer), first)
            if pieces:
                self.left = True
                yield layer, pieces
        self._host_from = [min(since, resident) for since in self._host_from]

    def _pieces(self, destination: torch.Tensor, source: torch.Tensor, first: int) -> list[Piece]:
        num_bytes = (self.length - first) * self.num_real * self._token_bytes
        tokens = slice(first, self.length)
        return [Piece(destination[tokens], source[tokens], num_bytes)] if num_bytes else []

    def drop_layers(self, resident: int) -> None:
        """Free the layers from `resident` on, which have been written back."""
        if resident < self.resident:
            self.resident = resident
            self._on_device = {n: held for n, held in self._on_device.items() if n < resident}
            self._measure()

    def settle(self) -> None:
        """Wait until the host can read what was written back."""
        self._link.wait(self._writing_back)
        self._writing_back = []

    # --- used by the decode session ----------------------------------------------------------

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Continue with these rows in this order, followed by unused rows up to `num_rows`."""
        self.num_rows = num_rows
        rows = torch.tensor([*kept, *[0] * (num_rows - len(kept))], dtype=torch.long)
        self._pick(rows.clamp(max=self.num_real - 1))

    def set_num_rows(self, num_real: int) -> None:
        """Keep only the first `num_real` rows as rows with KV of their own."""
        if num_real != self.num_real:
            self._pick(torch.arange(num_real))

    def _pick(self, rows: torch.Tensor) -> None:
        self.settle()
        self.num_real = len(rows)
        self._on_device = {n: old[:, rows.to(old.device)] for n, old in self._on_device.items()}
        for number, old in self._on_host.items():
            self._on_host[number] = self._fresh(on_host=True)
            self._on_host[number][: self.length] = old[: self.length, rows]
        self._measure()

    def restore(self, row: int, held: Sequence[torch.Tensor]) -> None:
        """Never called: rows are parked only where KV can be evicted, which it cannot be here."""
        raise AssertionError("a layered tail has no parked rows")

    def set_segments(self, rows: Sequence[object]) -> None:
        """Do nothing: the tokens are in this tail, wherever the rows' blocks are."""

    def set_lengths(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """Start a step. lengths: per row the tail's length, or 0 for all to empty the tail."""
        del max_tokens
        known = {length for length in lengths if length is not None}
        if known not in ({0}, {self.length}):
            raise AssertionError("rows whose layers are streamed begin together")
        if self.length not in known:
            self.settle()
            self.length, self.left, self._host_from = 0, False, []

    def make_room(self) -> None:
        """Grow the memory if the current token does not fit."""
        if self.length < self.num_tokens:
            return
        self.settle()
        self.num_tokens = min(2 * self.num_tokens, self.capacity)
        for held in (self._on_device, self._on_host):
            for layer, old in held.items():
                held[layer] = self._fresh(on_host=held is self._on_host)
                held[layer][: self.length] = old[: self.length]
        self._measure()

    def advance(self) -> None:
        """Count the current token as complete."""
        self.length += 1

    def read_tokens(self, parts: Sequence[tuple[int, int, int]]) -> list[LayeredTokens]:
        """Return tokens of rows, split by side. parts: (row, first, end)."""
        self.settle()
        return [self._taken(*part) for part in parts]

    def _taken(self, row: int, first: int, end: int) -> LayeredTokens:
        before = first if self.left else 0
        dtype, kept = self.layout.dtype, range(self.resident)
        streamed = range(self.resident, self.layout.num_layers)
        on_device = [self._layer(layer)[first:end, row] for layer in kept]
        on_host = [self._layer(n, on_host=True)[first - before : end, row] for n in streamed]
        return LayeredTokens(
            stack_layers(on_device, (end - first, 0, *self._token), dtype),
            stack_layers(on_host, (end - first + before, 0, *self._token), dtype),
            before,
        )

    # --- memory ------------------------------------------------------------------------------

    def _fresh(self, *, on_host: bool) -> torch.Tensor:
        """Allocate one layer. Zeros, because masked positions must never hold NaN."""
        size = (self.num_tokens, self.num_real, *self._token)
        device, pinned = self._device, on_host and self._device.type == "cuda"
        device = torch.device("cpu") if on_host else device
        return torch.zeros(size, dtype=self.layout.dtype, device=device, pin_memory=pinned)

    def _measure(self) -> None:
        self._scratch.count_unchecked(self.num_bytes - self._counted)
        self._counted = self.num_bytes
