"""Folders with `quantization_config`: what a projection's several tensors say, as one weight.

A method is a `Form` in the table of `forms`. Which projections are left plain (`ignore`,
`modules_to_not_convert`, `dynamic`) is seen from their tensors: they have a plain weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from beamwright.errors import InputError, said_by
from beamwright.models.formats.plain import DAMAGED, PlainFiles
from beamwright.models.formats.rows import StoredRows
from beamwright.models.grouped import GroupedLinear

Part = Callable[[str], Tensor | None]
"""A tensor of one projection, by the ending of its name."""
PartSizes = Mapping[str, tuple[int, ...]]
"""Sizes of those that there are."""


@dataclass(frozen=True)
class Groups:
    """Codes uint8 [out, in] of so many bits; scale and low [out, groups], in float32."""

    bits: int
    codes: Tensor
    scale: Tensor
    low: Tensor

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit each other, as in a damaged file."""
        (rows, columns), groups = self.codes.shape, self.scale.shape[-1]
        fits = self.scale.shape == self.low.shape == (rows, groups)
        if not fits or not groups or columns % (2 * groups):
            raise ValueError(f"scales {tuple(self.scale.shape)} of {rows} x {columns} codes")

    @classmethod
    def around(cls, zero: float | Tensor, bits: int, codes: Tensor, scale: Tensor) -> Groups:
        """Where a code, or one of each group, stands for nought."""
        return cls(bits, codes, scale, -(zero * scale))

    def values(self) -> Tensor:
        """[out, in] in float32."""
        grouped = self.codes.unflatten(1, (self.scale.shape[1], -1)).float()
        return torch.addcmul(self.low[..., None], grouped, self.scale[..., None]).flatten(1)

    def of_rows(self, rows: int) -> Groups:
        """The same where blocks in a row make a row."""
        parts = (part.reshape(rows, -1) for part in (self.codes, self.scale, self.low))
        return Groups(self.bits, *parts)

    def linear(self) -> GroupedLinear:
        """As products want it."""
        return GroupedLinear.of(4 if self.bits <= 4 else 8, self.codes, self.scale, self.low)


@dataclass(frozen=True)
class Form:
    """How a method stores a weight.

    main: the ending of the tensor that stands for `weight`, or more of them; beside: endings of
    those that belong to it. read: the weight in groups, or its values, of its parts and the
    `quantization_config`. size: of the weight, as its parts' sizes and these say.
    weight: the ending that it has without quantisation.
    """

    main: tuple[str, ...]
    beside: tuple[str, ...]
    read: Callable[[Part, Mapping[str, Any]], Groups | Tensor]
    size: Callable[[PartSizes, Part, Mapping[str, Any]], tuple[int, ...]]
    weight: str = ".weight"


class QuantisedFiles:
    """The tensors of a quantised checkpoint, as one that is not has them."""

    def __init__(self, files: PlainFiles, form: Form, config: Mapping[str, Any]) -> None:
        self._files, self._form, self._config = files, form, config
        self._stored = files.sizes

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that belong to a quantised weight are left out."""
        form = self._form
        stems = {n.removesuffix(end) for n in self._stored for end in form.main if n.endswith(end)}
        quantised = [stem for stem in sorted(stems) if self._main(stem + form.weight) is not None]
        parts = {stem + end for stem in quantised for end in (*form.main, *form.beside)}
        found = {name: size for name, size in self._stored.items() if name not in parts}
        for stem in quantised:
            ends = [end for end in (*form.main, *form.beside) if stem + end in self._stored]
            with self._reading(stem + form.weight):
                found[stem + form.weight] = form.size(
                    {end: self._stored[stem + end] for end in ends},
                    lambda end, stem=stem: self._files.tensor(stem + end),  # type: ignore[misc]
                    self._config,
                )
        return found

    def tensor(self, name: str) -> Tensor | None:
        """In float32 where it is quantised."""
        found = self._read(name)
        return found.values() if isinstance(found, Groups) else found

    def linear(self, name: str) -> GroupedLinear | None:
        """None where no groups of columns have a scale."""
        found = self._read(f"{name}.weight") if self._main(f"{name}.weight") else None
        return found.linear() if isinstance(found, Groups) else None

    def rows(self, name: str, dtype: torch.dtype) -> StoredRows | None:
        """None where it is quantised."""
        return None if self._main(name) else self._files.rows(name, dtype)

    def _main(self, name: str) -> str | None:
        """The stem of a weight that is quantised: other tensors of its name stand beside it."""
        stem, both = name.removesuffix(self._form.weight), (self._form.main, self._form.beside)
        quantised = all(any(stem + ending in self._stored for ending in each) for each in both)
        return stem if quantised and name.endswith(self._form.weight) else None

    def _read(self, name: str) -> Groups | Tensor | None:
        stem = self._main(name)
        if stem is None:
            return self._files.tensor(name)
        with self._reading(name):
            return self._form.read(lambda ending: self._files.tensor(stem + ending), self._config)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """What is raised is about this weight."""
        try:
            yield
        except DAMAGED as error:
            raise InputError(
                f"model {self._files.folder}: {name} cannot be read ({said_by(error)}): it is not "
                "as quantization_config says; take the original checkpoint with --weights int4"
            ) from error


def need(part: Part, ending: str) -> Tensor:
    """A tensor that has to be there. Raises ValueError."""
    found = part(ending)
    if found is None:
        raise ValueError(f"there is no {ending.removeprefix('.')}")
    return found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., count * 32 / bits] of int32 [..., count], the lowest bits first."""
    if not 2 <= bits <= 8:
        raise ValueError(f"{bits} bits")
    packed = words.to(torch.int32).contiguous().view(torch.uint8)
    if 8 % bits == 0:
        parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(-2)
    singles = (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    weights = torch.tensor([1 << bit for bit in range(bits)], dtype=torch.uint8)
    codes: Tensor = (singles.unflatten(-1, (-1, bits)) * weights).sum(-1, dtype=torch.uint8)
    return codes
