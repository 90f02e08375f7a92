"""Weight offloading: layers whose weights are at home on the host or on disk, and visit the device.

A device that cannot hold all weights keeps some layers. Each other layer is copied into one of a
few buffers before it runs (double buffering): while a layer computes, the next one arrives. All
rows of a pass share the copy, so a search with many rows pays for it once.

The tensors of an offloaded layer are views of a buffer. They never move, so a decoder runs the
layer as if it were resident. The bytes are the same, and so are the results. Small tensors, such as
norms and biases, stay on the device.
"""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from beamwright.errors import InputError
from beamwright.kv.link import Link, Transfer
from beamwright.kv.streams import FileBytes, LockedBlocks, Piece
from beamwright.plan.costs import WEIGHT_BUFFERS
from beamwright.protocols import Direction

_ALIGNED_BYTES = 64  # every tensor in a buffer begins at a multiple of this number


class MovableWeight(Protocol):
    """A projection whose tensors can be replaced: a `decoder.Linear`."""

    @property
    def stored(self) -> list[Tensor]: ...

    def place_stored(self, tensors: Sequence[Tensor]) -> None: ...


@dataclass
class _Layer:
    """One offloaded layer.

    buffer: the number of its buffer.
    linears: its projections, whose tensors are in the buffer.
    parts: the bytes of these tensors in the buffer, the destinations of copies.
    num_bytes: the layer's bytes at home.
    ready: the copy into the buffer that was queued last.
    """

    number: int
    buffer: int
    linears: Sequence[MovableWeight] = ()
    parts: Sequence[Tensor] = ()
    num_bytes: int = 0
    ready: Transfer | None = None


class WeightHome(Protocol):
    """Memory in which the weights of offloaded layers live."""

    def store(self, number: int, parts: Sequence[Tensor]) -> None:
        """Keep the bytes of a layer. parts: uint8 tensors, on the device or on the CPU."""

    def pieces(self, number: int, parts: Sequence[Tensor]) -> list[Piece]:
        """Return the copies that bring a layer's bytes to `parts`, in the order of `store`."""


class HostHome:
    """A `WeightHome` in host memory, page-locked if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._locks = device.type == "cuda"
        self._kept: dict[int, list[Tensor]] = {}
        self._owners: list[LockedBlocks] = []

    def store(self, number: int, parts: Sequence[Tensor]) -> None:
        self._kept[number] = [self._copy(part) for part in parts]

    def pieces(self, number: int, parts: Sequence[Tensor]) -> list[Piece]:
        return [
            Piece(to, source, source.nbytes)
            for to, source in zip(parts, self._kept[number], strict=True)
        ]

    def _copy(self, part: Tensor) -> Tensor:
        if not self._locks:
            return part.clone()
        blocks = LockedBlocks(1, part.nbytes)
        self._owners.append(blocks)
        return blocks.memory.by_block[0].copy_(part)


class FileHome:
    """A `WeightHome` in a temporary file, which the system removes when the process ends.

    Raises:
        InputError: if the file cannot be created; from `store`, if the disk is full.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[FileBytes]] = {}
        self._num_bytes = 0
        with _explain_disk_errors():
            file = tempfile.TemporaryFile(prefix="beamwright-weights-", buffering=0)  # noqa: SIM115
        self._handle = file.fileno()
        weakref.finalize(self, file.close)

    def store(self, number: int, parts: Sequence[Tensor]) -> None:
        kept = self._kept[number] = []
        for part in parts:
            with _explain_disk_errors():
                written = FileBytes.write(self._handle, self._num_bytes, part.numpy())
            kept.append(written)
            self._num_bytes += written.num_bytes

    def pieces(self, number: int, parts: Sequence[Tensor]) -> list[Piece]:
        return [
            Piece(to, source, source.num_bytes)
            for to, source in zip(parts, self._kept[number], strict=True)
        ]


@contextmanager
def _explain_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--weights-home disk: weights cannot be written to a temporary file ({error}). Free "
            "disk space there, or set TMPDIR to another folder."
        ) from error


class LayerOffload:
    """Keeps the weights of some layers at home, and brings each to the device before it runs.

    Fill it with `add` while a model is loaded, then call `close_loading`. A decoder then enters
    `one_pass` for every forward pass. Passes of several threads exclude each other.

    numbers: the numbers of the offloaded layers, in ascending order.
    link: how layers travel; a link of its own, because only one thread may call it.
    wait_s: seconds that compute waited for these copies, as far as the device has reported.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        home: WeightHome,
        link: Link,
        device: str,
    ) -> None:
        self._num_buffers = min(WEIGHT_BUFFERS, len(numbers))
        self._layers = {
            number: _Layer(number, turn % self._num_buffers) for turn, number in enumerate(numbers)
        }
        self._home, self._link, self._device = home, link, torch.device(device)
        self._lock = RLock()
        self._held: dict[int, int] = {}  # by buffer: the layer that is in it, or on its way
        self._buffers: list[Tensor] = []
        # oneDNN's tensors cannot be views of a buffer. So each buffer also has tensors of its own,
        # by (buffer, shape, number of earlier tensors of this shape in the layer).
        self._packed: dict[tuple[int, torch.Size, int], Tensor] = {}
        self.wait_s = 0.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of the offloaded layers."""
        return list(self._layers)

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to the device so far."""
        return self._link.bytes_moved[Direction.H2D]

    @property
    def home_bytes(self) -> int:
        """Bytes of weights at home."""
        return sum(layer.num_bytes for layer in self._layers.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        tensors = (*self._buffers, *self._packed.values())
        return sum(view_bytes(tensor).nbytes for tensor in tensors)

    # --- loading -----------------------------------------------------------------------------

    def add(self, number: int, linears: Sequence[MovableWeight]) -> None:
        """Move the weights of a layer home, if it is one of the offloaded layers.

        The layer cannot run until `close_loading` has been called.
        """
        if (layer := self._layers.get(number)) is None:
            return
        layer.linears = linears
        stored = [tensor for linear in linears for tensor in linear.stored]
        parts = [view_bytes(tensor) for tensor in stored]
        self._home.store(number, parts)
        layer.num_bytes = sum(part.nbytes for part in parts)
        placeholders, counts = list[Tensor](), Counter[torch.Size]()
        for tensor in stored:
            if tensor.is_mkldnn:
                kind = layer.buffer, tensor.shape, counts[tensor.shape]
                counts[tensor.shape] += 1
                placeholders.append(self._packed.setdefault(kind, tensor))
            else:
                placeholders.append(_without_memory(tensor))
        left = iter(placeholders)
        for linear in linears:
            linear.place_stored([next(left) for _ in linear.stored])

    def close_loading(self) -> None:
        """Allocate the buffers, and bind the weights of all offloaded layers to them.

        Raises:
            RuntimeError: if the device has too little memory.
        """
        sizes = [0] * self._num_buffers
        for layer in self._layers.values():
            needed = _buffer_bytes(layer.linears)
            sizes[layer.buffer] = max(sizes[layer.buffer], needed)
        self._buffers = [
            torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes
        ]
        for layer in self._layers.values():
            layer.parts = _bind(layer.linears, self._buffers[layer.buffer])

    # --- running -----------------------------------------------------------------------------

    @contextmanager
    def one_pass(self) -> Iterator[Callable[[int], None]]:
        """Return a function to call with a layer's number before the layer runs.

        The function waits until the layer's weights are on the device. It also marks the layer
        before as finished, so that its buffer takes the next layer.

        Raises:
            LinkError: from the function, if a copy has failed.
        """
        with self._lock:
            last: int | None = None

            def begin(number: int) -> None:
                nonlocal last
                self._finish(last)
                last = number
                self._require(number)

            yield begin
            self._finish(last)

    def close(self) -> None:
        """Stop the link, after the current pass. The next pass starts it again."""
        with self._lock:
            self._held.clear()
            self._link.close()

    def _require(self, number: int) -> None:
        layer = self._layers.get(number)
        if layer is None:
            return
        if self._held.get(layer.buffer) != number:
            self._fetch(layer)
        assert layer.ready is not None
        self.wait_s += self._link.delay_compute([layer.ready])

    def _finish(self, number: int | None) -> None:
        """Let the buffer of a layer that has run take the layer that needs it next."""
        layer = None if number is None else self._layers.get(number)
        if layer is None or self._held.get(layer.buffer) != number:
            return
        ring = [each.number for each in self._layers.values() if each.buffer == layer.buffer]
        follow = ring[(ring.index(layer.number) + 1) % len(ring)]
        if follow != number:
            self._fetch(self._layers[follow])

    def _fetch(self, layer: _Layer) -> None:
        """Queue the copy of a layer into its buffer, after all compute that is queued so far."""
        before = self._held.pop(layer.buffer, None)
        if before is not None and (left := self._layers[before].ready) is not None:
            self._link.cancel([left])
        pieces = self._home.pieces(layer.number, layer.parts)
        layer.ready = self._link.submit(Direction.H2D, "weights", pieces)
        self._held[layer.buffer] = layer.number


def _without_memory(tensor: Tensor) -> Tensor:
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
    span = _span(tensor)
    return tensor.as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)


def _span(tensor: Tensor) -> int:
    """Return the number of values from the first to the last in memory; more if it is a slice."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _buffer_bytes(linears: Sequence[MovableWeight]) -> int:
    """Return the bytes that the weights of one layer take in a buffer."""
    tensors = (tensor for linear in linears for tensor in linear.stored)
    return sum(_aligned(tensor) for tensor in tensors if not tensor.is_mkldnn)


def _bind(linears: Sequence[MovableWeight], buffer: Tensor) -> list[Tensor]:
    """Bind the weights of one layer to a buffer, and return the bytes of each tensor in it."""
    parts, at = list[Tensor](), 0
    for linear in linears:
        bound = []
        for like in linear.stored:
            if like.is_mkldnn:
                bound.append(like)
                continue
            place = buffer[at : at + _span(like) * like.itemsize].view(like.dtype)
            bound.append(place.as_strided(like.shape, like.stride(), place.storage_offset()))
            at += _aligned(like)
        linear.place_stored(bound)
        parts += map(view_bytes, bound)
    return parts


def _aligned(tensor: Tensor) -> int:
    """Return the bytes of a tensor in a buffer, up to where the next tensor begins."""
    return -(-_span(tensor) * tensor.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
