"""Files of weights: tensors by their Hugging Face names.

The own decoder's loader and the adapter over `transformers` both read through `StoredWeights`.
Imports neither torch nor a format before one is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from beamwright.models.formats.files import check_method, quantisation, read_written
from beamwright.models.formats.header import is_gguf

if TYPE_CHECKING:
    import torch

    from beamwright.models.formats.gguf import BlockLinear
    from beamwright.models.formats.plain import StoredRows
    from beamwright.models.grouped import GroupedLinear


class StoredWeights(Protocol):
    """One model's weights, whatever they are stored as; nothing of it stays in memory."""

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors by name, as a checkpoint that is not quantised has them; reads no weights.

        What has no meaning here has the file's own name.

        Raises:
            InputError: for tensors that cannot belong together.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """A copy of the tensor of that name as it is stored, or dequantised; None if there is none.

        Raises:
            InputError: if its file is damaged.
        """
        ...

    def linear(self, name: str) -> GroupedLinear | BlockLinear | None:
        """The projection `name.weight`, without its bias, in the form that the file keeps it in.

        None where that is plain, or a form that no `Linear` has: `tensor` gives its values.

        Raises:
            InputError: if its file is damaged.
        """
        ...

    def rows(self, name: str, dtype: torch.dtype) -> StoredRows | None:
        """Rows of a tensor that is there, in this precision; None where a file has none as such."""
        ...


def open_checkpoint(place: Path) -> StoredWeights:
    """The weights of a folder, or of a file that holds a model alone.

    Raises:
        InputError: for missing or unreadable files, or a format that is not read.
    """
    if is_gguf(place):
        from beamwright.models.formats.gguf import GgufWeights  # noqa: PLC0415 - torch

        return GgufWeights(place)
    from beamwright.models.formats.plain import PlainFiles  # noqa: PLC0415 - torch

    files, has_config = PlainFiles(place), (place / "config.json").is_file()
    quantised = quantisation(read_written(place)) if has_config else None
    if quantised is None:
        return files
    method = check_method(quantised)
    from beamwright.models.formats.quantised import (  # noqa: PLC0415 - torch
        FORMS,
        QuantisedFiles,
    )

    return QuantisedFiles(files, FORMS[method], quantised)
