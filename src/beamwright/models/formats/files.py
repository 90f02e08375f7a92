"""Which files of a folder hold its weights: what its config or its index names, as `transformers`
has it, and what their names say where it would find none. Needs no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from beamwright.errors import InputError
from beamwright.io import read_object

_INDEX = ".index.json"
_USUAL = (
    "model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX}",
)  # fmt: skip
_PATTERNS = ("model*.safetensors", "*-?????-of-?????.safetensors", "pytorch_model*.bin")
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.(?:safetensors|bin)")
_MOST_NAMES = 5


def weight_files(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """The file of each tensor that an index names, and all files of weights, in their order.

    Raises:
        InputError: if there are none, one is missing, or nothing says which of them are meant.
    """
    config = folder / "config.json"
    named = read_object(config).get("transformers_weights") if config.is_file() else None
    first = next((name for name in _USUAL if (folder / name).is_file()), None)
    if (file := named or first) is None:
        return {}, _by_name(folder)
    if not str(file).endswith(_INDEX):
        return {}, [_inside(folder, file)]
    files = read_object(index := _inside(folder, file)).get("weight_map")
    if not isinstance(files, dict):
        raise InputError(f"model index {index}: it has no weight_map of tensors to files")
    where = {name: _inside(folder, shard) for name, shard in files.items()}
    return where, sorted(set(where.values()))


def adapter_of(folder: Path) -> str | None:
    """What to do with a folder that holds no model but changes to one (LoRA); None for others."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    base = read_object(file).get("base_model_name_or_path") or "another model"
    return (
        f"an adapter (adapter_config.json) of {base!s:.200}: merge it into that model first "
        "(PEFT's merge_and_unload), and name the folder of the result"
    )


def _inside(folder: Path, file: object) -> Path:
    """A file that is named by another one, which may name anything."""
    path = folder / str(file)
    if ".." in Path(str(file)).parts or folder not in path.parents or not path.is_file():
        raise InputError(f"model {folder}: shard {file!s:.200} is missing")
    return path


def _by_name(folder: Path) -> list[Path]:
    """Without an index: a whole set of shards, or one file alone."""
    for pattern in _PATTERNS:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        sets = {match.groups() for path in found if (match := _SHARD.fullmatch(path.name))}
        if [len(found)] == ([int(count) for _, count in sets] or [1]):
            return found
        if found:
            names = ", ".join(path.name for path in found[:_MOST_NAMES])
            raise InputError(
                f"model {folder}: which of its files are the model? {names}: there is neither "
                f"{_USUAL[0]} nor {_USUAL[1]}; fetch the index, or the missing shards"
            )
    why = adapter_of(folder) or "no *.safetensors or pytorch_model*.bin weights"
    raise InputError(f"model {folder}: {why}")
