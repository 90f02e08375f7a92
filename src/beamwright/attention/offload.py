"""Packed copies with two device buffers, and the record of what is at home.

The parts of `layerwise` that know bytes and tokens. They know no attention and no order of layers,
which is `streams`. On a CPU both tiers are RAM: a resident layer is read where it was packed, a
streamed one from its buffer only. A layer that changes tier crosses the link into memory that is
dropped afterwards, so that its bytes and its time are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from beamwright.attention.layers import Entry
from beamwright.kv import ByteBudget, Link, Piece, ScratchMeter, Segment, Transfer

NUM_BUFFERS = 2
Array = np.ndarray[Any, Any]


def as_array(tensor: torch.Tensor) -> Array:
    """The same CPU memory for the link; bfloat16 goes as 16-bit integers."""
    plain = tensor.detach()
    view: Array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return view


def resident_layers(num_layers: int, budget_bytes: int, layer_bytes: int) -> int:
    """Eq. 1 with the two stream buffers inside the budget."""
    if num_layers * layer_bytes <= budget_bytes:
        return num_layers
    return max(0, budget_bytes // layer_bytes - NUM_BUFFERS)


class StreamedCopy:
    """A packed copy [layer, K or V, entry, kv_head, token, head_dim] and its two device buffers."""

    def __init__(
        self, slot_of: Callable[[int], int | None], data: torch.Tensor, entries: Sequence[Entry]
    ) -> None:
        self.data, self.entries, self._slot_of = data, entries, slot_of
        self.host = as_array(data)
        self.lengths = [entry.num_tokens for entry in entries]
        self.grows = any(entry.room for entry in entries)
        self.used: list[int] = []
        self._buffers: list[torch.Tensor] = []
        self._device: list[Array] = []
        self._runs: list[tuple[slice, int]] = []
        self._sealed: dict[tuple[int, int], list[Piece]] = {}
        self.token_bytes = 2 * data.shape[3] * data.shape[5] * data.element_size()
        self.layer_bytes = data[0].nbytes

    def layer(self, number: int) -> torch.Tensor:
        """See `layers.LayerSource`."""
        slot = self._slot_of(number)
        return self.data[number] if slot is None else self._buffers[slot]

    def open_buffers(self) -> None:
        """Allocate the two buffers. Zeros: masked positions must never hold NaN bits."""
        if not self._buffers:
            self._buffers = [torch.zeros_like(self.data[0]) for _ in range(NUM_BUFFERS)]
            self._device = [as_array(buffer) for buffer in self._buffers]

    def choose(self, rows: set[int]) -> int:
        """From here on move only what these rows read; returns the tokens that stand there."""
        used = [
            number for number, entry in enumerate(self.entries) if not rows.isdisjoint(entry.rows)
        ]
        self.used = used
        self._runs = [
            (slice(run[0], run[-1] + 1), self.lengths[run[0]])
            for run in neighbours(used, lambda a, b: self.lengths[a] == self.lengths[b])
        ]
        self._sealed.clear()
        return sum(self.lengths[number] for number in used)

    def sealed_pieces(self, layer: int, slot: int) -> list[Piece]:
        """The parts: what cannot change while the view lives and its rows stay."""
        if (layer, slot) not in self._sealed:
            self._sealed[layer, slot] = self._pieces(self._device[slot], layer, None)
        return self._sealed[layer, slot]

    def grown_pieces(self, layer: int, slot: int, num_tokens: int) -> list[Piece]:
        """The rows' own tokens behind the parts, where they stand in this copy."""
        if not self.grows or not num_tokens:
            return []
        return self._pieces(self._device[slot], layer, num_tokens)

    def landing_pieces(self, layer: int) -> list[Piece]:
        """The parts, into memory of their own: a layer that becomes resident."""
        return self._pieces(np.empty_like(self.host[layer]), layer, None)

    def home_pieces(
        self, number: int, at: int, segment: Segment, visible: int, layer: int
    ) -> Iterator[Piece]:
        """The tokens of a segment that stand at `at` of an entry, into memory of their own."""
        del segment
        source = self.host[layer][:, number, :, at : at + visible]
        yield Piece(np.empty_like(source), source, visible * self.token_bytes)

    def kept_pieces(self, resident: int) -> Iterator[tuple[int, Piece]]:
        """None: both tiers are one memory."""
        del resident
        return iter(())

    def left(self, resident: int) -> None:
        """Both tiers are one memory: nothing to forget."""

    def _pieces(self, destination: Array, layer: int, grown: int | None) -> list[Piece]:
        source, found = self.host[layer], []
        for entries, length in self._runs:
            tokens = slice(0, length) if grown is None else slice(length, length + grown)
            count = (entries.stop - entries.start) * (tokens.stop - tokens.start)
            near, far = destination[:, entries, :, tokens], source[:, entries, :, tokens]
            found.append(Piece(near, far, count * self.token_bytes))
        return found


def neighbours(numbers: Sequence[int], alike: Callable[[int, int], bool]) -> list[list[int]]:
    """Neighbouring numbers that are alike, so that one piece moves them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number and alike(runs[-1][-1], number):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class PackedCopy(Protocol):
    """What the record, and whoever streams layers, asks of a packed copy; see `StreamedCopy`."""

    entries: Sequence[Entry]
    used: list[int]
    lengths: list[int]
    grows: bool
    token_bytes: int
    layer_bytes: int

    def layer(self, number: int) -> torch.Tensor: ...

    def open_buffers(self) -> None: ...

    def choose(self, rows: set[int]) -> int: ...

    def sealed_pieces(self, layer: int, slot: int) -> list[Piece]: ...

    def grown_pieces(self, layer: int, slot: int, num_tokens: int) -> list[Piece]: ...

    def landing_pieces(self, layer: int) -> list[Piece]: ...

    def home_pieces(
        self, number: int, at: int, segment: Segment, visible: int, layer: int
    ) -> Iterator[Piece]: ...

    def kept_pieces(self, resident: int) -> Iterator[tuple[int, Piece]]: ...

    def left(self, resident: int) -> None: ...


@dataclass
class _Home:
    tokens: int
    home_from: int


class HomeRecord:
    """Which KV computed in resident layers has not been written home yet.

    Per segment, the first layer from which all its tokens are at home. It is one number for all
    that was computed since the latest decode view began: the highest of its tokens.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Segment, _Home] = WeakKeyDictionary()
        self._highest: int | None = None

    def used(self, home_from: int) -> None:
        """Tokens were computed that are at home from this layer on."""
        self._highest = max(self._highest or 0, home_from)

    def note(self, copies: Sequence[PackedCopy], num_layers: int) -> None:
        """Take in what the parts of a view's copies gained since they were last seen."""
        highest = num_layers if self._highest is None else self._highest
        for part in (part for copy in copies for entry in copy.entries for part in entry.parts):
            known = self._known.setdefault(part.segment, _Home(0, 0))
            if known.tokens < part.segment.length:
                known.tokens, known.home_from = (
                    part.segment.length,
                    max(known.home_from, highest),
                )

    def start_decoding(self) -> None:
        """A decode view begins: what it writes is told apart from what was written before."""
        self._highest = 0

    def write(self, copies: Sequence[PackedCopy], resident: int) -> Iterator[tuple[int, Piece]]:
        """(layer, piece) of all that is not at home in layers that are not resident.

        Each segment goes once, however many copies of it there are.
        """
        best: dict[Segment, tuple[int, PackedCopy, int, int]] = {}
        for copy in copies:
            for number in copy.used:
                at = 0
                for part in copy.entries[number].parts:
                    known = self._known[part.segment]
                    seen = best.get(part.segment)
                    if known.home_from > resident and (seen is None or seen[0] < part.visible):
                        best[part.segment] = (part.visible, copy, number, at)
                    at += part.visible
        for segment, (visible, copy, number, at) in best.items():
            for layer in range(resident, self._known[segment].home_from):
                for piece in copy.home_pieces(number, at, segment, visible, layer):
                    yield layer, piece
            self._known[segment].home_from = resident


@dataclass
class Offload:
    """What the views of one backend share, and what they count.

    resident: layers [0, resident) are on the device between views; None before the first forward,
        when whatever exists counts as resident in all layers.
    padding: device bytes of the copies and buffers that hold no token of a real row.
    tokens, streamed_layers: decoded tokens per row, and the layers streamed for them.
    discarded_bytes: fetched ahead for a token that did not come, or not with the same rows.
    """

    budget: ByteBudget
    link: Link
    resident: int | None = None
    home: HomeRecord = field(default_factory=HomeRecord)
    padding: ScratchMeter = field(default_factory=ScratchMeter)
    stall_s: float = 0.0
    tokens: int = 0
    streamed_layers: int = 0
    discarded_bytes: int = 0

    def order(self, transfers: Sequence[Transfer]) -> None:
        """Compute waits, be it on the host or on the device: that is the stall.

        A device tells later: without transfers, only what it has told meanwhile is added.
        """
        self.stall_s += self.link.order(transfers)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """The host waits, because it reads what has moved."""
        if transfers:
            self.stall_s += self.link.wait(transfers)
