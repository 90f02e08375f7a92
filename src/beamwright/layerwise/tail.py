"""Where layers reside for a token, and LayeredTail: rows' tokens whose streamed layers are on the
host.

A layer's tokens are contiguous on either side [token, row, 2, kv_head, head_dim], so that one copy
stores a token and one copy loads all of them. Only real rows are kept: what pads a batch
has no KV of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from beamwright.kv.link import Link, Transfer
from beamwright.kv.pool import KVLayout, ScratchMeter
from beamwright.kv.streams import Piece

NUM_BUFFERS = 2


def resident_layers(num_layers: int, budget_bytes: int, layer_bytes: int) -> int:
    """Eq. 1 with the two stream buffers inside the budget."""
    if num_layers * layer_bytes <= budget_bytes:
        return num_layers
    return max(0, budget_bytes // layer_bytes - NUM_BUFFERS)


@dataclass
class Placement:
    """The present token's layers and rows.

    resident: layers [0, resident) stay on the device. buffers: the stream buffer of each other
    layer that was fetched. rows: original numbers of the rows of the present batch; the first
    `num_real` have KV of their own, the others pad the batch.
    """

    resident: int
    rows: list[int]
    num_real: int
    buffers: dict[int, int] = field(default_factory=dict)

    def buffer_of(self, layer: int) -> int | None:
        """The stream buffer that holds a layer; None if the layer is resident."""
        return None if layer < self.resident else self.buffers[layer]


FIRST_TOKENS = 16
_CPU = torch.device("cpu")

Send = Callable[[Sequence[Piece]], Transfer]
"""Stores pieces on the host while the layer computes."""


@dataclass(frozen=True)
class LayeredTokens:
    """A row's new tokens, split by where their layers reside.

    on_device: [tokens, resident layers, 2, kv_heads, head_dim] on the device.
    on_host: the other layers on the host, behind `num_before` older tokens of the row.
    """

    on_device: torch.Tensor
    on_host: torch.Tensor
    num_before: int

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return self.on_device.shape[0]


def stack_layers(
    layers: list[torch.Tensor], size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """[tokens, layers, ...] of layers [tokens, ...]; zeros of this size where there are none."""
    return torch.stack(layers, dim=1) if layers else torch.zeros(size, dtype=dtype)


class LayeredTail:
    """A `Tail` whose rows are equally long, so that all of what is read is seen.

    A token of a streamed layer is written into the layer's stream buffer. Memory grows by doubling,
    up to a constant of the attention backend, so that the order of partial sums does not depend on
    the memory budget.

    length: tokens that every row holds. resident: layers [0, resident) reside on the device.
    left: layers have been written back since the tail was empty. num_real: rows that have KV of
    their own.
    """

    mask = None
    num_moves = 0  # no step is captured

    def __init__(
        self,
        layout: KVLayout,
        capacity: int,
        scratch: ScratchMeter,
        device: torch.device,
        link: Link,
    ) -> None:
        self.layout, self.capacity = layout, capacity
        self._scratch, self._device, self._link = scratch, device, link
        self._token = (2, layout.num_kv_heads, layout.head_dim)
        self._token_bytes = layout.bytes_per_token // layout.num_layers
        self._counted = 0
        self.close()

    def close(self) -> None:
        """No rows are left, and no memory."""
        self.num_rows = self.num_real = self.length = 0
        self.resident, self.left = self.layout.num_layers, False
        self.num_tokens = min(FIRST_TOKENS, self.capacity)
        self._placement = Placement(self.resident, [], 0)
        self._send: Send | None = None
        self._writing_back: list[Transfer] = []
        self._on_device: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._host_from: list[int] = []  # per token, the first layer from which the host has it
        self._measure()

    release = close

    @property
    def num_bytes(self) -> int:
        """Bytes of its resident layers."""
        return sum(held.nbytes for held in self._on_device.values())

    @property
    def places(self) -> torch.Tensor:
        return torch.full((self.num_rows,), self.length, device=self._device)

    # --- a view reads and writes -------------------------------------------------------------

    def open(self, placement: Placement, send: Send) -> None:
        """A view begins, which says where layers reside."""
        self._placement, self._send, self._buffers = placement, send, []

    def open_buffers(self) -> None:
        """Two stream buffers of the tail's present size."""
        if not self._buffers or self._buffers[0].shape[:2] != (self.num_tokens, self.num_real):
            self._buffers = [self._fresh(self._device) for _ in range(NUM_BUFFERS)]

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """In a streamed layer the token is written back over the link."""
        placement, step = self._placement, self.length
        if layer == 0:
            self._host_from[step:] = [placement.resident]
            self.resident = placement.resident
        own = key_value[: self.num_real].contiguous()
        buffer = placement.buffer_of(layer)
        if buffer is None:
            self.device_layer(layer)[step] = own
            return
        assert self._send is not None
        self._buffers[buffer][step] = own
        num_bytes = self.num_real * self._token_bytes
        self._writing_back.append(self._send([Piece(self.host_layer(layer)[step], own, num_bytes)]))

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that pad the batch read the first one's tokens."""
        held = self._held_tokens(layer)[: self.length + 1]
        padding = self.num_rows - self.num_real
        if padding:
            held = torch.cat([held, held[:, :1].expand(-1, padding, -1, -1, -1)], dim=1)
        both = held.permute(2, 1, 3, 0, 4)
        return both[0], both[1]

    def own_tokens(self, layer: int) -> torch.Tensor:
        """Device tokens [tokens, real rows, 2, kv_heads, head_dim] before the present one."""
        return self._held_tokens(layer)[: self.length]

    def device_layer(self, layer: int) -> torch.Tensor:
        """Device tokens [place, row, 2, kv_head, head_dim] of a resident layer."""
        if layer not in self._on_device:
            self._on_device[layer] = self._fresh(self._device)
            self._measure()
        return self._on_device[layer]

    def host_layer(self, layer: int) -> torch.Tensor:
        """The same on the host, pinned where there is a GPU."""
        if layer not in self._on_host:
            self._on_host[layer] = self._fresh(_CPU)
        return self._on_host[layer]

    def _held_tokens(self, layer: int) -> torch.Tensor:
        buffer = self._placement.buffer_of(layer)
        return self.device_layer(layer) if buffer is None else self._buffers[buffer]

    # --- what crosses the link ---------------------------------------------------------------

    def fetched_pieces(self, layer: int, buffer: int) -> list[Piece]:
        """The tokens so far of the real rows, into a stream buffer."""
        return self._pieces(self._buffers[buffer], self.host_layer(layer), 0)

    def landing_pieces(self, layer: int) -> list[Piece]:
        """The same for a layer that becomes resident."""
        return self._pieces(self.device_layer(layer), self.host_layer(layer), 0)

    def leaving_pieces(self, resident: int) -> Iterator[tuple[int, list[Piece]]]:
        """(layer, pieces) of tokens that the host lacks in layers from `resident` on.

        All of it counts as stored once the last one is taken.
        """
        for layer in range(resident, max(self._host_from, default=0)):
            first = next(i for i, since in enumerate(self._host_from) if since > layer)
            pieces = self._pieces(self.host_layer(layer), self.device_layer(layer), first)
            if pieces:
                self.left = True
                yield layer, pieces
        self._host_from = [min(since, resident) for since in self._host_from]

    def drop_layers(self, resident: int) -> None:
        """Layers from `resident` on have been written back: the device forgets them."""
        if resident < self.resident:
            self.resident = resident
            self._on_device = {n: held for n, held in self._on_device.items() if n < resident}
            self._measure()

    def settle(self) -> None:
        """Wait until the host can read what was written back."""
        self._link.wait(self._writing_back)
        self._writing_back = []

    def _pieces(self, destination: torch.Tensor, source: torch.Tensor, first: int) -> list[Piece]:
        num_tokens = (self.length - first) * self.num_real
        if not num_tokens:
            return []
        tokens = slice(first, self.length)
        return [Piece(destination[tokens], source[tokens], num_tokens * self._token_bytes)]

    # --- what a session does with it ---------------------------------------------------------

    def arrange(self, kept: Sequence[int], num_rows: int) -> None:
        """Go on with these rows in this order, and with free ones behind them."""
        self.num_rows = num_rows
        rows = torch.tensor([*kept, *[0] * (num_rows - len(kept))], dtype=torch.long)
        self._pick(rows.clamp(max=self.num_real - 1))

    def count_rows(self, num_real: int) -> None:
        """From here on only the first `num_real` rows have KV of their own."""
        if num_real != self.num_real:
            self._pick(torch.arange(num_real))

    def restore(self, row: int, held: torch.Tensor) -> None:
        """Rows are parked only where KV can be evicted, and here it cannot."""
        raise AssertionError("a layered tail has no parked rows")

    def begin(self, lengths: Sequence[int | None], max_tokens: int) -> None:
        """All rows hold what the tail holds, or nothing any more; see `make_room` for the rest."""
        del max_tokens
        known = {length for length in lengths if length is not None}
        if known not in ({0}, {self.length}):
            raise AssertionError("rows whose layers are streamed begin together")
        if self.length not in known:
            self.settle()
            self.length, self.left, self._host_from = 0, False, []

    def make_room(self) -> None:
        """Make sure that the current token has a place."""
        if self.length < self.num_tokens:
            return
        self.settle()
        self.num_tokens = min(2 * self.num_tokens, self.capacity)
        for held in (self._on_device, self._on_host):
            for layer, old in held.items():
                held[layer] = self._fresh(old.device)
                held[layer][: self.length] = old[: self.length]
        self._measure()

    def advance(self) -> None:
        """The current token is complete."""
        self.length += 1

    def take(self, row: int, first: int, end: int) -> LayeredTokens:
        """A row's tokens [first, end), by the side on which their layers reside."""
        self.settle()
        before = first if self.left else 0
        kept, streamed = range(self.resident), range(self.resident, self.layout.num_layers)
        on_device = [self.device_layer(layer)[first:end, row] for layer in kept]
        on_host = [self.host_layer(layer)[first - before : end, row] for layer in streamed]
        none = (end - first, 0, *self._token), (end - first + before, 0, *self._token)
        return LayeredTokens(
            stack_layers(on_device, none[0], self.layout.dtype),
            stack_layers(on_host, none[1], self.layout.dtype),
            before,
        )

    def _pick(self, rows: torch.Tensor) -> None:
        self.settle()
        self.num_real = len(rows)
        self._on_device = {n: old[:, rows.to(old.device)] for n, old in self._on_device.items()}
        for number, old in self._on_host.items():
            picked = self._fresh(_CPU)
            picked[: self.length] = old[: self.length, rows]
            self._on_host[number] = picked
        self._measure()

    # --- memory ------------------------------------------------------------------------------

    def _fresh(self, device: torch.device) -> torch.Tensor:
        """Memory for one layer, the host's pinned where there is a GPU.

        Zeros: masked positions must never hold NaN bits.
        """
        size = (self.num_tokens, self.num_real, *self._token)
        pinned = device.type == "cpu" and self._device.type == "cuda"
        return torch.zeros(size, dtype=self.layout.dtype, device=device, pin_memory=pinned)

    def _measure(self) -> None:
        self._scratch.add(self.num_bytes - self._counted)
        self._counted = self.num_bytes
