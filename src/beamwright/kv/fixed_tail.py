"""FixedTail: a tail at addresses that stay, whose length stands on the device.

A captured step is replayed with the addresses and the strides that it was captured with. So one
piece of memory serves all sessions of a model, one after the other, in few shapes; and where the
token is written is read from a tensor, as the host's count is not seen by a replay. Knows nothing
of graphs.
"""

from __future__ import annotations

from math import prod

import torch

from beamwright.kv.budget import ScratchMeter
from beamwright.kv.pool import KVLayout
from beamwright.kv.tail import FIRST_TOKENS, TailBuffer


class FixedTail(TailBuffer):
    """A `TailBuffer` that can be opened again; only one session may have it open.

    counter: [1] int32 on the device: tokens that attention reads, the current one included.
    num_moves: how often its memory was allocated anew. Bytes are counted until `release`.
    """

    def __init__(
        self, layout: KVLayout, capacity: int, scratch: ScratchMeter, device: str = "cpu"
    ) -> None:
        self.num_moves = 0
        self.counter = torch.ones(1, dtype=torch.int32, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._flat = torch.empty(0, dtype=layout.dtype, device=device)
        self._first_tokens = FIRST_TOKENS
        super().__init__(layout, 0, capacity, scratch, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory, whatever the present session uses of it."""
        return self._flat.nbytes

    def expect(self, num_tokens: int) -> None:
        """Steps of about so many tokens come: the next session begins with room for them."""
        self._first_tokens = max(FIRST_TOKENS, 1 << max(0, num_tokens - 1).bit_length())

    def open(self, num_rows: int) -> None:
        """Begin a session: no tokens yet, room for those that are expected."""
        self.length = 0
        self.storage = self._allocate(num_rows, min(self._first_tokens, self.capacity))

    def load(self) -> None:
        """Tell the device how many tokens there are."""
        self._place.fill_(self.length)
        self.counter.fill_(self.length + 1)

    def count(self) -> None:
        """The current token is complete, on the device; the host counts in `length`."""
        self._place.add_(1)
        self.counter.add_(1)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """See `TailBuffer`."""
        token = key_value.transpose(0, 1).unsqueeze(3)
        self.storage[layer].index_copy_(3, self._place, token)

    def make_room(self) -> None:
        """See `TailBuffer`."""
        held = self.storage.shape[4]
        if self.length >= held:
            self._refill(self.storage.clone(), min(2 * held, self.capacity))

    def keep_rows(self, rows: torch.Tensor) -> None:
        """See `TailBuffer`."""
        held = self.storage[..., : self.length, :].index_select(2, rows)
        self._refill(held, self.storage.shape[4])

    def close(self) -> None:
        """The session ends; the memory stays for the next one."""
        self.length = 0

    def release(self) -> None:
        """Give the memory back."""
        self._flat = self._flat.new_empty(0)
        self.storage = self._allocate(0, 0)
        self.length = 0
        self.num_moves += 1
        self._count(self._flat)

    def _refill(self, held: torch.Tensor, num_tokens: int) -> None:
        """Go on with these tokens, which stand elsewhere, in another shape of the same memory."""
        self.storage = self._allocate(held.shape[2], num_tokens)
        self.storage[..., : held.shape[4], :] = held

    def _allocate(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        shape = self._shape(num_rows, num_tokens)
        needed = prod(shape)
        if needed > self._flat.numel():
            # The old memory goes first: at 64 rows of a 7B shape it can be gigabytes.
            self.storage = self._flat = self._flat.new_empty(0)
            self._flat = self._flat.new_empty(needed)
            self.num_moves += 1
            self._count(self._flat)
        return self._flat[:needed].view(shape)
