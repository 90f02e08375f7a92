"""Files of weights: tensors by their Hugging Face names; what a config says of how they are kept.

The own decoder's loader and the adapter over `transformers` both read through `StoredWeights`.
Imports neither torch nor a format before one is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from beamwright.errors import UnsupportedModelError
from beamwright.io import read_object

if TYPE_CHECKING:
    import torch

    from beamwright.models.formats.rows import StoredRows
    from beamwright.models.grouped import GroupedLinear


GGUF = ".gguf"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes")
"""What a `quant_method` may be, see `forms`."""
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a model's config.json says that its weights are quantised; None if they are not."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    return found if isinstance(found, dict) else {}


def check_method(quantised: Mapping[str, Any]) -> str:
    """Which of METHODS a `quantization_config` names.

    Raises:
        UnsupportedModelError: for another one, and a variant that is not read.
    """
    method, form = quantised.get("quant_method"), quantised.get("format", "")
    if method is None and "config_groups" in quantised:
        method = "compressed-tensors"
    if method not in METHODS or (method == "compressed-tensors" and form not in _COMPRESSED):
        named = method if method not in METHODS else f"{method} {form}"
        raise UnsupportedModelError(
            f"weights quantised by {named or 'an unknown method'!s:.60} are not read "
            f"({', '.join(METHODS)} are)"
        )
    return str(method)


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

    def linear(self, name: str) -> GroupedLinear | None:
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
    if place.suffix == GGUF:
        from beamwright.models.formats.gguf import GgufWeights  # noqa: PLC0415 - torch

        return GgufWeights(place)
    from beamwright.models.formats.plain import PlainFiles  # noqa: PLC0415 - torch

    files, config = PlainFiles(place), place / "config.json"
    quantised = quantisation(read_object(config)) if config.is_file() else None
    if quantised is None:
        return files
    method = check_method(quantised)
    from beamwright.models.formats.forms import FORMS  # noqa: PLC0415 - torch
    from beamwright.models.formats.quantised import QuantisedFiles  # noqa: PLC0415 - torch

    return QuantisedFiles(files, FORMS[method], quantised)
