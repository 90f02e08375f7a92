"""Readers of weight files, which give tensors by their Hugging Face names (`StoredWeights`).

The loaders of Beamwright's own decoder and of models of `transformers` both use this interface.
torch and the module of a format are imported only when a checkpoint is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from beamwright.models.formats.files import find_method, read_config_file, read_quantisation
from beamwright.models.formats.header import is_gguf

if TYPE_CHECKING:
    import torch

    from beamwright.models.formats.gguf import BlockLinear
    from beamwright.models.formats.plain_files import RowReader
    from beamwright.models.grouped import GroupedLinear


class StoredWeights(Protocol):
    """The weights of one model in any file format. Tensors are not kept in memory after reading."""

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of all tensors by name, as an unquantised checkpoint of the model has them.

        Weights are not read. A tensor without a Hugging Face name has its name in the file.

        Raises:
            InputError: for tensors that cannot belong together.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a copy of a tensor, dequantised if it is quantised; None if it does not exist.

        Raises:
            InputError: if its file is damaged.
        """
        ...

    def quantised_linear(self, name: str) -> GroupedLinear | BlockLinear | None:
        """Return the projection `name.weight` without its bias, in the file's quantised format.

        None: the weight is plain, or no `Linear` class has its format; use `tensor` for its values.

        Raises:
            InputError: if its file is damaged.
        """
        ...

    def row_reader(self, name: str, dtype: torch.dtype) -> RowReader | None:
        """Return a reader of single rows of an existing tensor, which casts them to `dtype`.

        None: the file's format does not allow reading single rows.
        """
        ...


def open_checkpoint(place: Path) -> StoredWeights:
    """Open the weights of a folder or of a GGUF file.

    Raises:
        InputError: for missing or unreadable files, or for a format that is not supported.
    """
    if is_gguf(place):
        from beamwright.models.formats.gguf import GgufWeights  # noqa: PLC0415 - torch

        return GgufWeights(place)
    from beamwright.models.formats.plain_files import PlainFiles  # noqa: PLC0415 - torch

    files, has_config = PlainFiles(place), (place / "config.json").is_file()
    quantised = read_quantisation(read_config_file(place)) if has_config else None
    if quantised is None:
        return files
    method = find_method(quantised)
    from beamwright.models.formats.quantised_files import (  # noqa: PLC0415 - torch
        FORMS,
        QuantisedFiles,
    )

    return QuantisedFiles(files, FORMS[method], quantised)
