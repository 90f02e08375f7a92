"""Reads the header of a GGUF file: its metadata, and the places of its tensors.

The file is not trusted: sizes, counts and offsets are compared with its length before they are
used. This module needs no torch.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from beamwright.errors import InputError, UnsupportedModelError, message_of
from beamwright.io import read_regular, read_toml_beside

# The format characters of `struct` for GGUF's types of numbers.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MAGIC = b"GGUF"
_TEXT, _LIST = 8, 9  # GGUF's types of values that are no numbers
_LENGTH = struct.Struct("<Q")
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 20
_TYPES = read_toml_beside(__file__)
# For each tensor type: its name, the number of values in a block, and the bytes of a block.
BLOCKS: dict[int, tuple[str, int, int]] = {
    number: (name, values, size) for name, (number, values, size, *_) in _TYPES["read"].items()
}
# For each tensor type that stays quantised in memory: bits per code, and columns per group.
KEPT: dict[int, tuple[int, int]] = {
    number: tuple(kept) for number, _, _, *kept in _TYPES["read"].values() if kept
}


class TensorInfo(NamedTuple):
    """The position, shape and type of one tensor in a GGUF file."""

    file: Path
    # The outermost dimension comes first, as in torch: [rows, columns] or [columns].
    shape: tuple[int, ...]
    # The tensor type, a key of `BLOCKS`.
    kind: int
    # Position of the first byte.
    start: int
    # Number of bytes.
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a GGUF file, and its tensors by name.

    In the metadata a list of texts, such as the vocabulary, is replaced by its length, unless
    `read_header` was called with `texts`.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(place: Path) -> bool:
    """Return whether `place` is a GGUF file, by its first bytes. Ollama's files have no suffix.

    Raises:
        InputError: for a file that cannot be read.
    """
    try:
        return place.is_file() and read_regular(place, len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise InputError(f"model file {place}: cannot be read ({error.strerror})") from error


def read_header(file: Path, *, texts: bool = False) -> GgufHeader:
    """Read the header of a GGUF file, without weights.

    texts: True to read lists of texts; otherwise only their lengths.

    Raises:
        InputError: if the file is not a GGUF file, or is damaged.
        UnsupportedModelError: if a tensor has a type that is not supported.
    """
    try:
        status = file.stat()
        return (_read if texts else _read_cached)(file, texts, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise InputError(f"model file {file}: cannot be read ({message_of(error)})") from error


def _read(file: Path, texts: bool, *_version: int) -> GgufHeader:
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(file, data, texts).header()


# `_read` with a cache, only for headers without texts, because texts are large.
#
# The file's size and time are part of the cache key, so that a changed file is read again.
_read_cached = lru_cache(maxsize=16)(_read)


class _Cursor:
    """Reader of a GGUF header, which moves its position through the file value by value.

    texts: True to keep lists of texts.
    """

    def __init__(self, file: Path, data: mmap.mmap, texts: bool) -> None:
        self._file, self._data, self._at, self._texts = file, data, 0, texts

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError("the file is truncated")
        self._at += size
        return self._data[self._at - size : self._at]

    def _numbers(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self._take(count * struct.calcsize(f"<{kind}")))

    def _text(self) -> str:
        return self._take(self._numbers("Q")[0]).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])[0]
        if kind != _LIST:
            raise ValueError(f"unknown value type {kind}")
        each, count = *self._numbers("I"), *self._numbers("Q")
        if each == _TEXT:
            listed = self._texts_of(count)
            return listed if self._texts else count
        if each not in _NUMBERS:
            raise ValueError(f"unknown list type {each}")
        return list(self._numbers(_NUMBERS[each], count))

    def _texts_of(self, count: int) -> list[str]:
        """Read a list of `count` texts; without `texts`, skip it and return [].

        Every text takes bytes, so a count that is too large ends in an error.
        """
        data, at, collected, wanted = self._data, self._at, list[str](), self._texts
        for _ in range(count):
            first = at + _LENGTH.size
            if first > len(data) or (at := first + _LENGTH.unpack_from(data, at)[0]) > len(data):
                raise ValueError("the file is truncated")
            if wanted:
                collected.append(data[first:at].decode("utf-8", "replace"))
        self._at = at
        return collected

    def header(self) -> GgufHeader:
        """Read the whole header of a file of version 2 or 3."""
        if self._take(4) != _MAGIC:
            raise ValueError("not a GGUF file")
        version, *counts = *self._numbers("I"), *self._numbers("Q", 2)
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported; use 2 or 3")
        metadata = {self._text(): self._value(*self._numbers("I")) for _ in range(counts[1])}
        tensors = {name: self._tensor(name) for name in (self._text() for _ in range(counts[0]))}
        step = metadata.get("general.alignment", 32)
        if (
            not isinstance(step, int)
            or not 0 < step <= _MOST_ALIGNMENT
            or len(tensors) != counts[0]
        ):
            raise ValueError("two tensors have one name, or general.alignment is invalid")
        first = -(-self._at // step) * step
        for name, place in tensors.items():
            tensors[name] = place._replace(start=first + place.start)
            if first + place.start + place.size > len(self._data):
                raise ValueError(f"tensor {name!r:.80} ends after the file")
        return GgufHeader(metadata, tensors)

    def _tensor(self, name: str) -> TensorInfo:
        """Read a tensor's entry. Its `start` is relative to the first tensor's first byte."""
        (rank,) = self._numbers("I")
        if rank > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {rank:,} dimensions")
        shape = self._numbers("Q", rank)[::-1]
        kind, offset = *self._numbers("I"), *self._numbers("Q")
        if kind not in BLOCKS:
            named = _TYPES["unread"].get(str(kind), f"number {kind}")
            raise UnsupportedModelError(
                f"tensor {name!r:.80} has type {named}, which is not supported: use a Q4_K_M or "
                "Q8_0 file of this model"
            )
        _, values, size = BLOCKS[kind]
        if not shape or not all(shape) or shape[-1] % values:
            raise ValueError(f"a tensor of shape {shape} does not fit blocks of {values}")
        return TensorInfo(self._file, shape, kind, offset, prod(shape) // values * size)
