"""Files of weights, one format per module: tensors by their Hugging Face names.

The own decoder's loader and the adapter over `transformers` both read through `StoredWeights`.
Imports neither torch nor a format before one is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from beamwright.models.decoder import Linear


class StoredWeights(Protocol):
    """One model's weights, whatever they are stored as; nothing of it stays in memory."""

    def names(self) -> list[str]:
        """Of all tensors, as a checkpoint that is not quantised has them; reads no weights."""
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """A copy of the tensor of that name as it is stored, or dequantised; None if there is none.

        Raises:
            InputError: if its file is damaged.
        """
        ...

    def linear(self, name: str) -> Linear | None:
        """The projection `name.weight`, without its bias, in the form that the file keeps it in.

        None where that is plain, or a form that no `Linear` has: `tensor` gives its values. Scales
        are in float32; `Linear.placed` brings them to a dtype and device.

        Raises:
            InputError: if its file is damaged.
        """
        ...


def open_checkpoint(place: Path) -> StoredWeights:
    """The weights of a folder, or of a file that holds a model alone.

    Raises:
        InputError: for missing or unreadable files, or a format that is not read.
    """
    from beamwright.models.formats.plain import PlainFiles  # noqa: PLC0415 - torch

    return PlainFiles(place)
