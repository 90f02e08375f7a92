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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor

from beamwright.kv.link import Link, Transfer
from beamwright.models.decoder import Linear
from beamwright.models.weight_homes import WeightHome
from beamwright.plan.costs import WEIGHT_BUFFERS
from beamwright.protocols import Direction

_ALIGNED_BYTES = 64  # every tensor in a buffer begins at a multiple of this number


class Weights:
    """Weights that move together: the projections of a layer, or of one expert.

    key: their key in the home. linears: the projections. num_bytes: their bytes at home.
    sizes: bytes of each of their tensors in a buffer, and True if oneDNN packed the tensor.
    parts: the bytes of these tensors in the buffer, the destinations of copies.
    ready: the copy that was queued last.
    """

    def __init__(self, key: Hashable, linears: Sequence[Linear]) -> None:
        self.key, self.linears = key, linears
        self.parts: list[Tensor] = []
        self.ready: Transfer | None = None
        self._tensors = [tensor for linear in linears for tensor in linear.stored]
        self.sizes = [(view_bytes(each).nbytes, each.is_mkldnn) for each in self._tensors]
        self.num_bytes = sum(size for size, _ in self.sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that these weights need in a buffer, without tensors that oneDNN packed."""
        return sum(_aligned(size) for size, packed in self.sizes if not packed)

    def move_home(self, home: WeightHome) -> list[Tensor]:
        """Copy the weights home and drop their memory. Return the tensors that oneDNN packed."""
        home.store(self.key, [view_bytes(tensor) for tensor in self._tensors])
        packed = [tensor for tensor in self._tensors if tensor.is_mkldnn]
        self._place([_without_memory(tensor) for tensor in self._tensors])
        self._tensors = []
        return packed

    def bind(self, buffer: Buffer) -> None:
        """Use the memory of a buffer for the weights."""
        bound, at = list[Tensor](), 0
        likes = (tensor for linear in self.linears for tensor in linear.stored)
        for order, (like, (size, packed)) in enumerate(zip(likes, self.sizes, strict=True)):
            if packed:
                bound.append(buffer.packed[order, size])
                continue
            place = buffer.memory[at : at + size].view(like.dtype)
            bound.append(place.as_strided(like.shape, like.stride(), place.storage_offset()))
            at += _aligned(size)
        self.parts = [view_bytes(tensor) for tensor in bound]
        self._place(bound)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        given = iter(tensors)
        for linear in self.linears:
            linear.place_stored([next(given) for _ in linear.stored])


class Buffer:
    """Device memory for weights that are not always on the device.

    holds: the weights that are in the buffer or on their way; None at first.
    packed: tensors in oneDNN's own order, which cannot be views of the buffer's memory, by the
        tensor's place among the weights and its bytes.
    """

    def __init__(self) -> None:
        self.holds: Weights | None = None
        self.packed: dict[tuple[int, int], Tensor] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes + sum(size for _, size in self.packed)

    def accept(self, weights: Weights, packed: Sequence[Tensor]) -> bool:
        """Keep tensors that oneDNN packed, as memory for others of the same sizes.

        Return whether the buffer had no such tensors yet.
        """
        places = [
            (order, size) for order, (size, is_packed) in enumerate(weights.sizes) if is_packed
        ]
        known = [place for place in places if place in self.packed]
        for place, tensor in zip(places, packed, strict=True):
            self.packed.setdefault(place, tensor)
        return not known


class _Mover:
    """Brings weights from their home to buffers over a link.

    link: a link of its own, because only one thread may call it.
    """

    def __init__(self, home: WeightHome, link: Link) -> None:
        self.home, self._link = home, link
        self.bytes_moved, self.wait_s = 0, 0.0

    def fetch(self, weights: Weights, buffer: Buffer) -> None:
        """Queue a copy into a buffer, after all compute that is queued so far."""
        before = buffer.holds
        if before is not None and before.ready is not None and not before.ready.finished:
            self._link.cancel([before.ready])
        buffer.holds = None
        pieces = self.home.pieces(weights.key, weights.parts)
        weights.ready = self._link.submit(Direction.H2D, "weights", pieces)
        buffer.holds = weights
        self.bytes_moved += weights.num_bytes

    def wait(self, weights: Weights) -> None:
        """Make compute wait until the copy that was queued last is complete.

        Raises:
            LinkError: if it has failed.
        """
        assert weights.ready is not None
        self.wait_s += self._link.delay_compute([weights.ready])

    def close(self) -> None:
        """Stop the link. The next copy starts it again."""
        self._link.close()


class WeightOffload(ABC):
    """Base class: what a decoder and a solver know of weights that are not on the device.

    home, link: where the weights live, and how they travel.
    shares_link: True if KV travels over the same physical link.
    table_bytes: bytes of an embedding table that is not on the device either.
    """

    def __init__(self, home: WeightHome, link: Link, device: str, *, shares_link: bool) -> None:
        self.table_bytes = 0
        self.shares_link, self._device = shares_link, torch.device(device)
        self._mover, self._lock = _Mover(home, link), RLock()

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to the device so far."""
        return self._mover.bytes_moved

    @property
    def wait_s(self) -> float:
        """Seconds that compute waited for these copies, as far as the device has reported."""
        return self._mover.wait_s

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers with weights that are not on the device."""

    @property
    @abstractmethod
    def home_bytes(self) -> int:
        """Bytes of all weights at home."""

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Bytes of all buffers on the device."""

    @property
    @abstractmethod
    def pass_bytes(self) -> int:
        """Bytes that a pass of many rows copies to the device."""

    @abstractmethod
    def add(
        self, number: int, linears: Sequence[Linear], experts: Sequence[Sequence[Linear]] = ()
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
        """Stop the link. The next pass starts it again."""
        self._mover.close()


class LayerOffload(WeightOffload):
    """Keeps some layers at home, and brings each to the device before it runs.

    numbers: the numbers of these layers, in ascending order. link: how they travel.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        home: WeightHome,
        link: Link,
        device: str,
        *,
        shares_link: bool = True,
    ) -> None:
        super().__init__(home, link, device, shares_link=shares_link)
        self._buffers = [Buffer() for _ in range(min(WEIGHT_BUFFERS, len(numbers)))]
        self._turns = {number: turn for turn, number in enumerate(numbers)}
        self._layers: dict[int, Weights] = {}

    @property
    def num_layers(self) -> int:
        return len(self._turns)

    @property
    def home_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self._layers.values())

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._buffers)

    @property
    def pass_bytes(self) -> int:
        return self.home_bytes

    # --- loading -----------------------------------------------------------------------------

    def add(
        self, number: int, linears: Sequence[Linear], experts: Sequence[Sequence[Linear]] = ()
    ) -> None:
        if number not in self._turns:
            return
        whole = [*linears, *(linear for each in experts for linear in each)]
        layer = self._layers[number] = Weights(number, whole)
        self._buffer(number).accept(layer, layer.move_home(self._mover.home))

    def close_loading(self) -> None:
        most = max(layer.buffer_bytes for layer in self._layers.values())
        for buffer in self._buffers:
            buffer.memory = torch.zeros(most, dtype=torch.uint8, device=self._device)
        for number, layer in self._layers.items():
            layer.bind(self._buffer(number))

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

            try:
                yield begin
            finally:
                self._finish(last)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.holds = None
        super().close()

    def _buffer(self, number: int) -> Buffer:
        return self._buffers[self._turns[number] % len(self._buffers)]

    def _require(self, number: int) -> None:
        if (layer := self._layers.get(number)) is None:
            return
        if self._buffer(number).holds is not layer:
            self._mover.fetch(layer, self._buffer(number))
        self._mover.wait(layer)

    def _finish(self, number: int | None) -> None:
        """Let the buffer of a layer that has run take the layer that needs it next."""
        if number not in self._layers or self._buffer(number).holds is not self._layers[number]:
            return
        ring = [each for each in self._turns if self._buffer(each) is self._buffer(number)]
        follow = ring[(ring.index(number) + 1) % len(ring)]
        if follow != number:
            self._mover.fetch(self._layers[follow], self._buffer(number))


def _without_memory(tensor: Tensor) -> Tensor:
    if tensor.is_mkldnn:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    size = tensor.shape, tensor.stride()
    return torch.empty_strided(*size, dtype=tensor.dtype, device="meta")


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as uint8 [bytes], without copying.

    The caller keeps the tensor, because the view of a oneDNN tensor does not.
    """
    if tensor.is_mkldnn:
        size = torch.ops.mkldnn._nbytes(tensor)
        memory = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(tensor))
        return torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
