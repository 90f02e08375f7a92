"""LayeredTail: a tail whose streamed layers stand on the host, token by token.

Stands in for a `TailBuffer` where the store is layered. A layer's tokens are contiguous on either
side [token, row, 2, kv_head, head_dim], so that one copy brings a token home and one copy brings
all of them back. Only real rows are kept: what pads a batch has no KV of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beamwright.kv.budget import ScratchMeter
from beamwright.kv.link import Link, Transfer
from beamwright.kv.pool import KVLayout
from beamwright.kv.tail import TailBuffer

_FIRST_TOKENS = 16


@dataclass(frozen=True)
class LayeredTokens:
    """A row's new tokens, split by where their layers stand.

    near: [tokens, resident layers, 2, kv_heads, head_dim] on the device. far: the other layers on
    the host, behind `num_before` older tokens of the row.
    """

    near: torch.Tensor
    far: torch.Tensor
    num_before: int

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return self.near.shape[0]


class LayeredTail(TailBuffer):
    """See the module.

    resident: layers [0, resident) stand on the device. left: layers have gone home since the tail
    was empty. num_real: rows that have KV of their own.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_rows: int,
        capacity: int,
        scratch: ScratchMeter,
        device: torch.device,
        link: Link,
    ) -> None:
        self.num_real = self._num_rows = num_rows
        self.resident, self.left = layout.num_layers, False
        self._compute_device, self._link = device, link
        self._going_home: list[Transfer] = []
        self._near: dict[int, torch.Tensor] = {}
        self._far: dict[int, torch.Tensor] = {}
        self.held_tokens = min(_FIRST_TOKENS, capacity)
        super().__init__(layout, num_rows, capacity, scratch, "cpu")

    @property
    def num_rows(self) -> int:
        """Rows of the present batch, padding included."""
        return self._num_rows

    def near(self, layer: int) -> torch.Tensor:
        """Device tokens [place, row, 2, kv_head, head_dim] of a layer."""
        if layer not in self._near:
            self._near[layer] = self.fresh(self._compute_device)
            self._measure()
        return self._near[layer]

    def far(self, layer: int) -> torch.Tensor:
        """The same on the host, pinned where there is a GPU."""
        if layer not in self._far:
            self._far[layer] = self._fresh_far()
        return self._far[layer]

    def fresh(self, device: torch.device) -> torch.Tensor:
        """Memory for one layer, the host's pinned where there is a GPU.

        Zeros: masked positions must never hold NaN bits.
        """
        layout = self.layout
        size = (self.held_tokens, self.num_real, 2, layout.num_kv_heads, layout.head_dim)
        pinned = device.type == "cpu" and self._compute_device.type == "cuda"
        return torch.zeros(size, dtype=layout.dtype, device=device, pin_memory=pinned)

    def goes_home(self, transfer: Transfer) -> None:
        """Tokens are on their way to `far`."""
        self._going_home.append(transfer)

    def settle(self) -> None:
        """Wait until the host can read what went home."""
        self._link.wait(self._going_home)
        self._going_home = []

    def drop_near(self) -> None:
        """Layers that are not resident any more are at home: free their device memory."""
        self._near = {layer: held for layer, held in self._near.items() if layer < self.resident}
        self._measure()

    def make_room(self) -> None:
        """See `TailBuffer`."""
        if self.length < self.held_tokens:
            return
        self.settle()
        self.held_tokens = min(2 * self.held_tokens, self.capacity)
        self._near = {n: self._moved(old, self.fresh(old.device)) for n, old in self._near.items()}
        self._far = {n: self._moved(old, self._fresh_far()) for n, old in self._far.items()}
        self._measure()

    def take(  # type: ignore[override]  # its own store knows what it gets
        self, row: int, first: int, end: int
    ) -> LayeredTokens:
        """A row's tokens [first, end), by the side on which their layers stand."""
        self.settle()
        layers = self.layout.num_layers
        before = first if self.left else 0
        near = [self.near(layer)[first:end, row] for layer in range(self.resident)]
        far = [self.far(layer)[first - before : end, row] for layer in range(self.resident, layers)]
        size = (2, self.layout.num_kv_heads, self.layout.head_dim)
        none = torch.zeros((0, *size), dtype=self.layout.dtype)
        return LayeredTokens(
            torch.stack(near, dim=1) if near else none.new_zeros((end - first, 0, *size)),
            torch.stack(far, dim=1) if far else none.new_zeros((end - first + before, 0, *size)),
            before,
        )

    def restore(self, rows: list[torch.Tensor]) -> None:
        """Rows are parked only where KV can be evicted, and here it cannot."""
        raise AssertionError("a layered tail has no parked rows")

    def count_rows(self, num_real: int) -> None:
        """From here on only the first `num_real` rows have KV of their own."""
        if num_real != self.num_real:
            self._pick(torch.arange(num_real))

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, in this order."""
        self._num_rows = len(rows)
        self._pick(rows.cpu().clamp(max=self.num_real - 1))

    def clear(self) -> None:
        """See `TailBuffer`."""
        self.settle()
        self.length, self.left = 0, False

    def close(self) -> None:
        """See `TailBuffer`."""
        self._near, self._far = {}, {}
        super().close()

    # --- inside ------------------------------------------------------------------------------

    def _pick(self, rows: torch.Tensor) -> None:
        self.settle()
        self.num_real = len(rows)
        self._near = {n: old[:, rows.to(old.device)] for n, old in self._near.items()}
        for number, old in self._far.items():
            picked = self._fresh_far()
            picked[: self.length] = old[: self.length, rows]
            self._far[number] = picked
        self._measure()

    def _moved(self, old: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        fresh[: self.length] = old[: self.length]
        return fresh

    def _fresh_far(self) -> torch.Tensor:
        return self.fresh(torch.device("cpu"))

    def _allocate(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Layers get their memory one by one, on the side where they stand."""
        del num_rows, num_tokens
        return torch.empty(0, dtype=self.layout.dtype)

    def _measure(self) -> None:
        num_bytes = sum(held.nbytes for held in self._near.values())
        self._scratch.add(num_bytes - self._counted)
        self._counted = num_bytes
