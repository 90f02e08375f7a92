"""Whether a checkpoint's tensors are those of the model that its config describes: names and sizes.

The one comparison of the own decoder, GGUF files and the adapter over `transformers`; it comes
before any value is read, and `doctor` makes it, too. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from beamwright.errors import InputError
from beamwright.models.formats.known import TENSORS, is_among

Sizes = Mapping[str, tuple[int, ...]]

_CAUSES = {
    "base_model.model.*": "saved by PEFT and not merged: merge_and_unload, and save that",
    "*lora_*": "an adapter's weights: merge them into the model first (PEFT's merge_and_unload)",
    "_orig_mod.*": "saved from a compiled model: save its _orig_mod instead",
    "module.*": "saved from a wrapped model: save its module instead",
    "*.scales": "quantised by MLX or another tool that config.json does not name: take the "
    "original checkpoint with --weights int4",
    "*_scale*": "scales of quantised weights that config.json does not tell of: add its "
    "quantization_config, or take the original checkpoint",
    "*_packed": "quantised weights that config.json does not tell of: take the original checkpoint",
    "*.bias": "the config says that there are no such biases, so it is another model's",
}
_INCOMPLETE = "fetch all files of the model"
_OTHERS = "the config is another model's, or does not say how the weights are packed"


def check_fit(
    needed: Sizes, stored: Sizes, where: str, kind: str, spare: Iterable[str] = ()
) -> None:
    """Every tensor of the checkpoint is used, or known not to matter, and none is missing.

    needed, stored: sizes by name; what has no meaning here is stored by the file's own name.
    where, kind: the model and its architecture, for messages. spare: patterns of more names that
    do not matter.

    Raises:
        InputError: that names a tensor left over, missing or of another size, and what to do.
    """
    spared = (*TENSORS.harmless, *spare)
    left = [name for name in stored if name not in needed and not is_among(name, spared)]
    missing = [name for name in needed if name not in stored]
    strange = f"is not one of a {kind} with this config"
    faults = [
        f"weight {names[0]} {what}{f' (and {len(names) - 1:,} more)' * (len(names) > 1)}"
        for what, names in {"is missing": missing, strange: left}.items()
        if names
    ] or [
        f"weight {name} has shape {stored[name]}, config says {size}"
        for name, size in needed.items()
        if stored[name] != size
    ][:1]
    causes = [why for pattern, why in _CAUSES.items() if left and is_among(left[0], [pattern])]
    causes += [_INCOMPLETE if missing and not left else _OTHERS]
    if faults:
        raise InputError(f"{where}: {', '.join(faults)}: {causes[0]}")
