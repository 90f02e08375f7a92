"""Reads the tensors of GGUF files, by their Hugging Face names.

Types with codes of 4, 5, 6 or 8 bits and a linear scale stay quantised. Their blocks, uint8 [count,
bytes], become a `QuantisedWeight` with one block per row, without rounding. `transformers`
dequantises the other types. Blocks are memory-mapped from the file until they are packed. Other
tensors are read in pieces, so that only one piece is in memory twice.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from beamwright.errors import InputError
from beamwright.models.decoder import Linear
from beamwright.models.formats.gguf_metadata import TensorNameMap, permuted_heads, read_gguf_header
from beamwright.models.formats.header import BLOCKS, TensorInfo
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.formats.quantised_files import QuantisedWeight
from beamwright.models.grouped import GroupedLinear, check_size

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_PIECE_BYTES = 1 << 20


class BlockLinear(Linear):
    """A projection as the blocks of a GGUF file, which `models.native` can multiply directly.

    kind: the GGUF type, a key of `BLOCKS`. weight: uint8 [out, bytes of a row].
    columns: number of columns. what: name of the weight, for messages.
    """

    def __init__(self, kind: int, weight: Tensor, columns: int, what: str = "") -> None:
        super().__init__(weight)
        self.kind, self.columns, self.what, self._device = kind, columns, what, "cpu"

    @property
    def size(self) -> tuple[int, int]:
        """The weight's size (outputs, columns)."""
        return len(self.weight), self.columns

    def check_and_place(self, size: tuple[int, ...], device: str, what: str) -> BlockLinear:
        """Check the size, set the device for the result of `grouped`, and return this projection.

        what: the weight's name, for messages.

        Raises:
            InputError: if the weight does not have this size.
        """
        check_size(self.size, size, what)
        self.what, self._device = what, device
        return self

    def grouped(self) -> GroupedLinear:
        """Convert to a `GroupedLinear`, on the device given to `check_and_place`.

        Raises:
            NotFiniteError: if a scale is NaN or infinite.
        """
        rows, tables = max(1, _PIECE_BYTES // self.weight.shape[1]), list[GroupedLinear]()
        for piece in self.weight.split(rows):
            blocks = piece.reshape(-1, BLOCKS[self.kind][2])
            tables.append(UNPACK_BLOCKS[self.kind](blocks).of_rows(len(piece)).to_linear())
        table = torch.cat([each.weight for each in tables])
        whole = GroupedLinear(tables[0].bits, table, self.columns)
        return whole.check_and_place(self.size, self._device, self.what)


class GgufWeights:
    """`StoredWeights` of the model in a GGUF file or in its shards."""

    def __init__(self, file: Path) -> None:
        model = read_gguf_header(file)
        self._where, self._heads = model.tensors, permuted_heads(model.metadata)
        self._names = TensorNameMap(model.metadata.get("general.architecture"))

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of all tensors by name, see `StoredWeights`. Each expert is separate."""
        shapes = {}
        for name, place in self._where.items():
            known = self._names.hugging_face_names(name, place.shape[0])
            if not known:
                shapes[name] = place.shape
            for ours in known:
                shapes[ours] = (self._locate(ours) or (place,))[0].shape
        return shapes

    def tensor(self, name: str) -> Tensor | None:
        """Return a copy of a tensor, in float32 if it is quantised; None if it does not exist."""
        if (located := self._locate(name)) is None:
            return None
        place, order = located
        dtype = _PLAIN.get(place.kind, torch.float32)
        whole, at = torch.empty(prod(place.shape), dtype=dtype), 0
        for piece in _pieces(place):
            values = _dequantise(piece, place.kind)
            whole[at : at + values.numel()] = values.flatten()
            at += values.numel()
        whole = whole.view(place.shape)
        if self._names.unit_offset and name.endswith("norm.weight"):
            whole -= 1
        return whole if order is None else whole[order]

    def row_reader(self, name: str, dtype: torch.dtype) -> RowReader | None:
        """Return a reader of single rows, which dequantises them.

        None if rows must be reordered, or if only `transformers` can dequantise the type.
        """
        place, order = self._locate(name) or (None, None)
        if place is None or order is not None or place.kind not in _PLAIN | UNPACK_BLOCKS:
            return None
        kind, columns = place.kind, place.shape[-1]
        _, values, size = BLOCKS[kind]

        def convert(read: Tensor) -> Tensor:
            return _dequantise(read.view(-1, size), kind).view(-1, columns).to(dtype)

        return RowReader(place.file, place.start, columns // values * size, convert)

    def quantised_linear(self, name: str) -> BlockLinear | None:
        """Return a projection in the file's blocks; None for types without a linear scale."""
        located = self._locate(f"{name}.weight")
        if located is None or located[0].kind not in UNPACK_BLOCKS or len(located[0].shape) != 2:
            return None
        place, order = located
        rows = _map_bytes(place).view(place.shape[0], -1)
        return BlockLinear(place.kind, rows if order is None else rows[order], place.shape[1])

    def _locate(self, name: str) -> tuple[TensorInfo, Tensor | None] | None:
        """Locate a tensor by its Hugging Face name; None if the file does not have it.

        Return its place in the file, and the order in which Hugging Face has its rows, or None if
        the order is the same. An expert's place is a part of the tensor with all experts.
        """
        called, expert = self._names.gguf_name(name)
        if (place := self._where.get(called)) is None:
            return None
        if expert is not None:
            count, *shape = place.shape
            if expert >= count or not shape:
                return None
            size = place.size // count
            start = place.start + expert * size
            place = place._replace(shape=tuple(shape), start=start, size=size)
        heads = self._heads.get(called.split(".")[-2])
        if heads is None:
            return place, None
        if place.shape[0] % (2 * heads):
            raise InputError(f"model file {place.file}: tensor {called} does not fit {heads} heads")
        order = torch.arange(place.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
        return place, order


def _map_bytes(place: TensorInfo) -> Tensor:
    """Map a tensor's bytes into memory until the result, uint8 [bytes], is freed.

    Writing to the result does not change the file.
    """
    spare = place.start % mmap.ALLOCATIONGRANULARITY
    with open(place.file, "rb") as stream:
        where = {"length": spare + place.size, "offset": place.start - spare}
        pages = mmap.mmap(stream.fileno(), access=mmap.ACCESS_COPY, **where)
    pages.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=spare)


def _pieces(place: TensorInfo) -> Iterator[Tensor]:
    """Read a tensor in pieces of whole rows, and yield the blocks [count, bytes] of each piece."""
    row = place.shape[-1] // BLOCKS[place.kind][1] * BLOCKS[place.kind][2]
    step = max(1, _PIECE_BYTES // row) * row
    with open(place.file, "rb", buffering=0) as stream:
        stream.seek(place.start)
        for at in range(0, place.size, step):
            piece = bytearray(min(step, place.size - at))
            if stream.readinto(piece) != len(piece):
                raise InputError(f"model file {place.file}: the file is truncated")
            yield torch.frombuffer(piece, dtype=torch.uint8).view(-1, BLOCKS[place.kind][2])


def _dequantise(blocks: Tensor, kind: int) -> Tensor:
    if kind in _PLAIN:
        return blocks.view(_PLAIN[kind])
    if kind in UNPACK_BLOCKS:
        return UNPACK_BLOCKS[kind](blocks).dequantise()
    try:
        from transformers.integrations.gguf.dequant import dequantize  # noqa: PLC0415 - slow
    except ImportError as error:
        named = BLOCKS[kind][0]
        raise InputError(f"GGUF tensors of type {named} need transformers 5.23 or later") from error
    values: Tensor = dequantize(blocks.flatten(), kind)
    return values


# --- blocks -------------------------------------------------------------------------------------


def _float16_at(blocks: Tensor, first: int) -> Tensor:
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _unpack_nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack 4-bit codes: for each run of `run` bytes all low nibbles, then all high nibbles."""
    runs = packed.unflatten(1, (-1, run))
    return torch.cat([runs & 15, runs >> 4], dim=-1).flatten(1)


def _unpack_fifth_bits(packed: Tensor) -> Tensor:
    """Unpack the fifth bits of 32 codes from 4 bytes, and shift them to their place in a code."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and lows [blocks, 8] of the 8 groups in each block of Q4_K or Q5_K.

    12 bytes hold 6 bits for each number. One float16 multiplies the scales, another the lows.
    """
    first, second, third = blocks[:, 4:16].split(4, dim=1)
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    low = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return scale * _float16_at(blocks, 0), -(low * _float16_at(blocks, 2))


def _q5_k(blocks: Tensor) -> QuantisedWeight:
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return QuantisedWeight(
        8, _unpack_nibbles(blocks[:, 48:], 32) | bits.flatten(1) << 4, *_k_scales(blocks)
    )


def _q6_k(blocks: Tensor) -> QuantisedWeight:
    upper = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> torch.arange(0, 8, 2)[:, None] & 3
    codes = _unpack_nibbles(blocks[:, :128], 64) | upper.to(torch.uint8).flatten(1) << 4
    return QuantisedWeight.around(
        32, 8, codes, blocks[:, 192:208].view(torch.int8) * _float16_at(blocks, 208)
    )


# For each GGUF type number, a function that unpacks blocks [count, bytes] to codes and scales.
UNPACK_BLOCKS: dict[int, Callable[[Tensor], QuantisedWeight]] = {
    2: lambda b: QuantisedWeight.around(8, 4, _unpack_nibbles(b[:, 2:], 16), _float16_at(b, 0)),
    3: lambda b: QuantisedWeight(
        4, _unpack_nibbles(b[:, 4:], 16), _float16_at(b, 0), _float16_at(b, 2)
    ),
    6: lambda b: QuantisedWeight.around(
        16, 8, _unpack_nibbles(b[:, 6:], 16) | _unpack_fifth_bits(b[:, 2:6]), _float16_at(b, 0)
    ),
    7: lambda b: QuantisedWeight(
        8,
        _unpack_nibbles(b[:, 8:], 16) | _unpack_fifth_bits(b[:, 4:8]),
        _float16_at(b, 0),
        _float16_at(b, 2),
    ),
    8: lambda b: QuantisedWeight.around(128, 8, b[:, 2:] ^ 128, _float16_at(b, 0)),
    12: lambda b: QuantisedWeight(4, _unpack_nibbles(b[:, 16:], 32), *_k_scales(b)),
    13: _q5_k,
    14: _q6_k,
}
