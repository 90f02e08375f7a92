"""GGUF: tensors of one file, or of several of one model, by their Hugging Face names.

What has 4, 5, 6 or 8 bits with a scale stays so (`blocks`); other types are turned back by
`transformers`. Files are read, not mapped; of a tensor a piece at a time is in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from beamwright.errors import InputError
from beamwright.models.formats.blocks import PARTS
from beamwright.models.formats.described import Names, permuted_heads, shards
from beamwright.models.formats.header import BLOCKS, Place, read_header
from beamwright.models.formats.rows import StoredRows
from beamwright.models.grouped import GroupedLinear

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_PIECE_BYTES = 1 << 20


class GgufWeights:
    """The tensors of a GGUF file."""

    def __init__(self, file: Path) -> None:
        headers = [(shard, read_header(shard)) for shard in shards(file)]
        self._where = {
            name: (shard, place) for shard, each in headers for name, place in each.tensors.items()
        }
        metadata = headers[0][1].metadata
        self._heads = permuted_heads(metadata)
        self._names = Names(metadata.get("general.architecture"))

    def names(self) -> list[str]:
        """Of all tensors whose meaning is known; one of each expert."""
        named = ((name, place) for name, (_, place) in self._where.items())
        return [
            ours for name, place in named for ours in self._names.hugging_face(name, place.shape[0])
        ]

    def tensor(self, name: str) -> Tensor | None:
        """In float32 where the file has it in blocks."""
        if (found := self._find(name)) is None:
            return None
        file, place, order = found
        dtype = _PLAIN.get(place.kind, torch.float32)
        whole, at = torch.empty(prod(place.shape), dtype=dtype), 0
        for piece in _pieces(file, place):
            values = _values(piece, place.kind)
            whole[at : at + values.numel()] = values.flatten()
            at += values.numel()
        whole = whole.view(place.shape)
        if self._names.lifted and name.endswith("norm.weight"):
            whole -= 1
        return whole if order is None else whole[order]

    def rows(self, name: str, dtype: torch.dtype) -> StoredRows | None:
        """None where they are wanted in another order, or only `transformers` turns them back."""
        file, place, order = self._find(name) or (None, None, None)
        if file is None or place is None or order is not None or place.kind not in _PLAIN | PARTS:
            return None
        kind, columns = place.kind, place.shape[-1]
        _, values, size = BLOCKS[kind]

        def turn(read: Tensor) -> Tensor:
            return _values(read.view(-1, size), kind).view(-1, columns).to(dtype)

        return StoredRows(file, place.start, columns // values * size, turn)

    def linear(self, name: str) -> GroupedLinear | None:
        """Codes as the file has them; None for types whose levels are no straight line."""
        found = self._find(f"{name}.weight")
        if found is None or found[1].kind not in PARTS or len(found[1].shape) != 2:
            return None
        file, place, order = found
        tables = []
        for piece in _pieces(file, place):
            rows = len(piece) * BLOCKS[place.kind][1] // place.shape[1]
            tables.append(PARTS[place.kind](piece).of_rows(rows).linear())
        table = torch.cat([each.weight for each in tables])
        table = table if order is None else table[order]
        return GroupedLinear(tables[0].bits, table, place.shape[1])

    def _find(self, name: str) -> tuple[Path, Place, Tensor | None] | None:
        """A tensor's file, place, and in which order its rows are wanted."""
        called, expert = self._names.theirs(name)
        if called not in self._where:
            return None
        file, place = self._where[called]
        if expert is not None:
            count, *shape = place.shape
            if expert >= count or not shape:
                return None
            size = place.size // count
            place = Place(tuple(shape), place.kind, place.start + expert * size, size)
        heads = self._heads.get(called.split(".")[-2])
        if heads is None:
            return file, place, None
        if place.shape[0] % (2 * heads):
            raise InputError(f"model file {file}: tensor {called} does not fit {heads} heads")
        order = torch.arange(place.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
        return file, place, order


def _pieces(file: Path, place: Place) -> Iterator[Tensor]:
    """A tensor's blocks [count, bytes], some whole rows at a time."""
    row = place.shape[-1] // BLOCKS[place.kind][1] * BLOCKS[place.kind][2]
    step = max(1, _PIECE_BYTES // row) * row
    with open(file, "rb", buffering=0) as stream:
        stream.seek(place.start)
        for at in range(0, place.size, step):
            piece = bytearray(min(step, place.size - at))
            if stream.readinto(piece) != len(piece):
                raise InputError(f"model file {file}: it ends too early")
            yield torch.frombuffer(piece, dtype=torch.uint8).view(-1, BLOCKS[place.kind][2])


def _values(blocks: Tensor, kind: int) -> Tensor:
    if kind in _PLAIN:
        return blocks.view(_PLAIN[kind])
    if kind in PARTS:
        return PARTS[kind](blocks).values()
    try:
        from transformers.integrations.gguf.dequant import dequantize  # noqa: PLC0415 - slow
    except ImportError as error:
        named = BLOCKS[kind][0]
        raise InputError(f"GGUF tensors of type {named} want transformers 5.23") from error
    values: Tensor = dequantize(blocks.flatten(), kind)
    return values
