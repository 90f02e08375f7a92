"""Weight offloading: weights that are at home on the host or on disk, and visit the device.

A device that cannot hold all weights keeps some layers. Each other layer is copied into one of a
few buffers before it runs (double buffering): while a layer computes, the next one arrives. All
rows of a pass share the copy, so a search with many rows pays for it once.

The tensors of offloaded weights are views of a buffer, so a decoder runs a layer as if it were
resident. The bytes are the same, and so are the results. Small tensors, such as norms and biases,
stay on the device. `expert_offload` is for mixtures of experts.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from beamwright.kv.link import Link, Transfer
from beamwright.models.weight_homes import WeightHome
from beamwright.plan.costs import WEIGHT_BUFFERS
from beamwright.protocols import Direction

_ALIGNED_BYTES = 64  # every tensor in a buffer begins at a multiple of this number


class MovableWeight(Protocol):
    """A projection whose tensors can be replaced: a `decoder.Linear`."""

    @property
    def stored(self) -> list[Tensor]: ...

    def place_stored(self, tensors: Sequence[Tensor]) -> None: ...


# A tensor that oneDNN packed: its shape, and the number of earlier tensors of this shape.
PackedKey = tuple[torch.Size, int]


class Weights:
    """Weights that move together: the projections of a layer, or of one expert.

    key: their key in the home. linears: the projections. num_bytes: their bytes at home.
    places: for each of their tensors, its bytes in a buffer, or which of the buffer's packed
        tensors it is.
    parts: the bytes of these tensors in the buffer, the destinations of copies.
    """

    # The buffer that they are bound to. It may hold other weights at the moment.
    buffer: Buffer

    def __init__(self, key: Hashable, linears: Sequence[MovableWeight]) -> None:
        self.key, self.linears = key, linears
        self.parts: list[Tensor] = []
        self.num_bytes = 0
        self.places: list[int | PackedKey] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes that these weights need in a buffer, without tensors that oneDNN packed."""
        return sum(_aligned(place) for place in self.places if isinstance(place, int))

    def move_home(self, home: WeightHome) -> dict[PackedKey, Tensor]:
        """Copy the weights home and drop their memory. Return the tensors that oneDNN packed."""
        tensors = [tensor for linear in self.linears for tensor in linear.stored]
        parts, packed = [view_bytes(tensor) for tensor in tensors], dict[PackedKey, Tensor]()
        counts = Counter[torch.Size]()
        for tensor, part in zip(tensors, parts, strict=True):
            if tensor.is_mkldnn:
                packed[tensor.shape, counts[tensor.shape]] = tensor
                self.places.append((tensor.shape, counts[tensor.shape]))
                counts[tensor.shape] += 1
            else:
                self.places.append(part.nbytes)
        home.store(self.key, parts)
        self.num_bytes = sum(part.nbytes for part in parts)
        self._place([_without_memory(tensor) for tensor in tensors])
        return packed

    def bind(self, buffer: Buffer) -> None:
        """Use the memory of a buffer for the weights."""
        self.buffer = buffer
        bound, at = list[Tensor](), 0
        likes = (tensor for linear in self.linears for tensor in linear.stored)
        for like, place in zip(likes, self.places, strict=True):
            if not isinstance(place, int):
                bound.append(buffer.packed[place])
                continue
            memory = buffer.memory[at : at + place].view(like.dtype)
            bound.append(memory.as_strided(like.shape, like.stride(), memory.storage_offset()))
            at += _aligned(place)
        self.parts = [view_bytes(tensor) for tensor in bound]
        self._place(bound)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        given = iter(tensors)
        for linear in self.linears:
            linear.place_stored([next(given) for _ in linear.stored])


class Buffer:
    """Device memory for weights that are not always on the device.

    holds: the weights that are in the buffer or on their way; None at first.
    filled: the copy into the buffer that was queued last.
    packed: tensors in oneDNN's own order, which cannot be views of the buffer's memory.
    """

    def __init__(self) -> None:
        self.holds: Weights | None = None
        self.filled: Transfer | None = None
        self.packed: dict[PackedKey, Tensor] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        tensors = (self.memory, *self.packed.values())
        return sum(view_bytes(tensor).nbytes for tensor in tensors if tensor.numel())

    def accept(self, packed: Mapping[PackedKey, Tensor]) -> bool:
        """Keep tensors that oneDNN packed, as memory for others of the same sizes.

        Return whether the buffer had none of them yet.
        """
        is_new = packed.keys().isdisjoint(self.packed)
        self.packed = {**packed, **self.packed}
        return is_new


class _Mover:
    """Brings weights from their home to buffers over a link.

    link: a link of its own, because only one thread may call it.
    """

    def __init__(self, home: WeightHome, link: Link) -> None:
        self.home, self._link, self.wait_s = home, link, 0.0

    @property
    def bytes_moved(self) -> int:
        """Bytes that the link has copied to the device."""
        return self._link.bytes_moved[Direction.H2D]

    def fetch(self, weights: Weights) -> None:
        """Queue a copy into the weights' buffer, after all compute that is queued so far."""
        buffer = weights.buffer
        if buffer.filled is not None and not buffer.filled.finished:
            self._link.cancel([buffer.filled])
        buffer.holds = None
        pieces = self.home.pieces(weights.key, weights.parts)
        buffer.filled = self._link.submit(Direction.H2D, "weights", pieces)
        buffer.holds = weights

    def wait(self, weights: Weights) -> None:
        """Make compute wait until the weights are in their buffer.

        Raises:
            LinkError: if the copy has failed.
        """
        assert weights.buffer.holds is weights
        assert weights.buffer.filled is not None
        self.wait_s += self._link.delay_compute([weights.buffer.filled])

    def close(self) -> None:
        """Stop the link. The next copy starts it again."""
        self._link.close()


class WeightOffload(ABC):
    """Base class: what a decoder and a solver know of weights that are not on the device.

    home, link: where the weights live, and how they travel.
    table_bytes: bytes of an embedding table that is not on the device either.
    """

    def __init__(self, home: WeightHome, link: Link, device: str) -> None:
        self.table_bytes = 0
        self._device = torch.device(device)
        self._mover, self._lock = _Mover(home, link), RLock()
        self._weights: dict[int, list[Weights]] = {}  # by layer
        self._buffers: list[Buffer] = []

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to the device so far."""
        return self._mover.bytes_moved

    @property
    def wait_s(self) -> float:
        """Seconds that compute waited for these copies, as far as the device has reported."""
        return self._mover.wait_s

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the layers with weights that are not on the device."""
        return tuple(self._weights)

    @property
    def home_bytes(self) -> int:
        """Bytes of all weights at home."""
        return sum(each.num_bytes for layer in self._weights.values() for each in layer)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers on the device."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    @property
    def pass_bytes(self) -> int:
        """Bytes that a pass of many rows copies to the device."""
        return self.home_bytes

    @abstractmethod
    def add(
        self,
        number: int,
        linears: Sequence[MovableWeight],
        experts: Sequence[Sequence[MovableWeight]] = (),
    ) -> None:
        """Move weights of a layer home while a model is loaded, as far as they are offloaded.

        experts: the projections of each expert of the layer.
        """

    @abstractmethod
    def close_loading(self) -> None:
        """Allocate the buffers; weights that were added can be used from now on.

        Raises:
            RuntimeError: if the device has too little memory.
        """

    def bring_experts(self, layer: int) -> Callable[[Sequence[int]], Iterator[int]] | None:
        """Return a function that brings experts of a layer; None if they come with the layer.

        The function takes the numbers of experts, and yields each once it is on the device. The
        caller uses an expert before it asks for the next one.
        """
        return None

    @contextmanager
    def one_pass(self) -> Iterator[Callable[[int], None]]:
        """Give a function to call with a layer's number before the layer runs.

        Passes of several threads exclude each other.

        Raises:
            LinkError: from the function, if a copy has failed.
        """
        with self._lock:
            yield lambda number: None

    def close(self) -> None:
        """Stop the link, after the current pass. The next pass starts it again."""
        with self._lock:
            self._forget()
            self._mover.close()

    def _forget(self) -> None:
        """Forget which weights the buffers hold."""
        for buffer in self._buffers:
            buffer.holds = None


class LayerOffload(WeightOffload):
    """Keeps some layers at home, and brings each to the device before it runs.

    numbers: the numbers of these layers, in ascending order. link: how they travel.
    """

    def __init__(self, numbers: Sequence[int], home: WeightHome, link: Link, device: str) -> None:
        super().__init__(home, link, device)
        count = min(WEIGHT_BUFFERS, len(numbers))
        self._buffers += [Buffer() for _ in range(count)]
        self._turns = {number: turn % count for turn, number in enumerate(numbers)}
        rings = [[each for each in numbers if self._turns[each] == turn] for turn in range(count)]
        # By layer: the one that its buffer takes next.
        self._next = {each: after for ring in rings for each, after in pairwise([*ring, ring[0]])}

    # --- loading -----------------------------------------------------------------------------

    def add(
        self,
        number: int,
        linears: Sequence[MovableWeight],
        experts: Sequence[Sequence[MovableWeight]] = (),
    ) -> None:
        if number not in self._turns:
            return
        layer = Weights(number, [*linears, *chain.from_iterable(experts)])
        self._buffers[self._turns[number]].accept(layer.move_home(self._mover.home))
        self._weights[number] = [layer]

    def close_loading(self) -> None:
        for turn, buffer in enumerate(self._buffers):
            users = [
                each for number, (each,) in self._weights.items() if self._turns[number] == turn
            ]
            most = max((each.buffer_bytes for each in users), default=0)
            buffer.memory = torch.zeros(most, dtype=torch.uint8, device=self._device)
            for each in users:
                each.bind(buffer)

    # --- running -----------------------------------------------------------------------------

    @contextmanager
    def one_pass(self) -> Iterator[Callable[[int], None]]:
        with self._lock:
            last: int | None = None

            def begin(number: int) -> None:
                nonlocal last
                self._finish(last)
                last = number
                self._require(number)

            yield begin
            self._finish(last)

    def _require(self, number: int) -> None:
        for layer in self._weights.get(number, ()):
            if layer.buffer.holds is not layer:
                self._mover.fetch(layer)
            self._mover.wait(layer)

    def _finish(self, number: int | None) -> None:
        """Let the buffer of a layer that has run take the layer that needs it next."""
        if number not in self._weights:
            return
        (layer,), (follow,) = self._weights[number], self._weights[self._next[number]]
        if layer.buffer.holds is layer and follow is not layer:
            self._mover.fetch(follow)


def _without_memory(tensor: Tensor) -> Tensor:
    if tensor.is_mkldnn:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    size = tensor.shape, tensor.stride()
    return torch.empty_strided(*size, dtype=tensor.dtype, device="meta")


def view_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as uint8 [bytes], from its first value to its last, without copying.

    The caller keeps the tensor, because the view of a oneDNN tensor does not.
    """
    if tensor.is_mkldnn:
        size = torch.ops.mkldnn._nbytes(tensor)
        memory = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(tensor))
        return torch.frombuffer(memory, dtype=torch.uint8)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)  # more values if it is a slice
    return tensor.as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
