"""Finds the weight files of a checkpoint folder, and how its config says they are quantised.

As in `transformers`, the config or the index names the files. Where `transformers` would find none,
patterns of file names decide. This module needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_json_object

_INDEX = ".index.json"
_USUAL = (
    "model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX}",
)  # fmt: skip
_PATTERNS = ("model*.safetensors", "*-?????-of-?????.safetensors", "pytorch_model*.bin")
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.(?:safetensors|bin)")
_MOST_NAMES = 5
# The supported values of `quant_method`, see `quantised.FORMS`.
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes")
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # ModelOpt's methods that store weights as `fp8`
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


# --- quantisation ----------------------------------------------------------------------------


def read_quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section of a config.json that describes quantisation; None if there is none."""
    section = config.get("quantization_config") or config.get("compression_config")
    if config.get("quantization"):
        return {"quant_method": "MLX"}
    if not section:
        return None
    return section if isinstance(section, dict) else {}


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json, and add the quantisation in hf_quant_config.json if it has none.

    Raises:
        InputError: if config.json is missing, or a file is not a JSON object.
    """
    written, file = read_json_object(folder / "config.json"), folder / "hf_quant_config.json"
    if file.is_file() and read_quantisation(written) is None:
        said = read_json_object(file).get("quantization")
        if isinstance(said, dict) and said.get("quant_algo"):
            written["quantization_config"] = {"quant_method": "modelopt", **said}
    return written


def find_method(quantised: Mapping[str, Any]) -> str:
    """Return the quantisation method of a `quantization_config`, one of `METHODS`.

    Raises:
        UnsupportedModelError: for another method, or for a variant that is not supported.
    """
    method, form = quantised.get("quant_method"), quantised.get("format", "")
    if method == "modelopt":
        form = quantised.get("quant_algo")
        method = "fp8" if form in _MODELOPT else f"modelopt {form}"
    if method is None and "config_groups" in quantised:
        method = "compressed-tensors"
    if method not in METHODS or (method == "compressed-tensors" and form not in _COMPRESSED):
        named = method if method not in METHODS else f"{method} {form}"
        raise UnsupportedModelError(
            f"weights quantised by {named or 'an unknown method'!s:.60} are not "
            f"supported; use one of {', '.join(METHODS)}"
        )
    return str(method)


def packed_sizes(
    config: Mapping[str, Any], matrices: Iterable[tuple[int, int, int]]
) -> dict[str, Any]:
    """Return the field `packed` of `ModelShape` for a quantised folder.

    {}: weights are not quantised, or loading dequantises them.
    matrices: (rows, columns, count) of the projections.
    """
    if (form := _bits_and_group(read_quantisation(config) or {})) is None:
        return {}
    bits, group = form
    packed = 0
    for rows, columns, count in matrices:
        each = group if group > 0 else columns
        packed += count * (rows * columns // each * (each * bits // 8 + bits))
    return {"packed": (packed, 0)}


def _bits_and_group(quantised: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the bits per code in memory, 4 or 8, and the columns per scale (-1: the whole row).

    None: projections are dequantised when they are loaded.
    """
    groups = quantised.get("config_groups")
    if isinstance(groups, dict) and groups:
        quantised = {**next(iter(groups.values()))["weights"], "desc_act": False}
        if quantised.get("type") != "int":
            return None
    elif quantised.get("load_in_8bit"):
        return 8, -1
    elif quantised.get("quant_method") not in ("awq", "gptq") or quantised.get("desc_act"):
        return None
    bits, group = quantised.get("bits", quantised.get("num_bits")), quantised.get("group_size")
    return (4 if int(bits or 8) <= 4 else 8), int(group or -1)


# --- files of weights ------------------------------------------------------------------------


def weight_files(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the index, from tensor to file ({} if there is none), and all weight files, sorted.

    Raises:
        InputError: if there are no weight files, if one is missing, or if the folder has several
            and does not say which ones are the model.
    """
    config = folder / "config.json"
    named = read_json_object(config).get("transformers_weights") if config.is_file() else None
    first = next((name for name in _USUAL if (folder / name).is_file()), None)
    if (file := named or first) is None:
        return {}, _unindexed_files(folder)
    if not str(file).endswith(_INDEX):
        return {}, [_named_file(folder, file)]
    files = read_json_object(index := _named_file(folder, file)).get("weight_map")
    if not isinstance(files, dict):
        raise InputError(f"model index {index}: weight_map must map tensors to files")
    where = {name: _named_file(folder, shard) for name, shard in files.items()}
    return where, sorted(set(where.values()))


def adapter_advice(folder: Path) -> str | None:
    """Return advice for an error message if a folder holds only a LoRA adapter; None otherwise."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    base = read_json_object(file).get("base_model_name_or_path") or "another model"
    return (
        f"this folder holds only an adapter of {base!s:.200} (adapter_config.json): merge it into "
        "that model with PEFT's merge_and_unload, and pass the merged folder"
    )


def _named_file(folder: Path, file: object) -> Path:
    """Return the path of a file in `folder` that a config or an index names.

    Raises:
        InputError: if the name leads out of the folder, or the file does not exist.
    """
    path = folder / str(file)
    if ".." in Path(str(file)).parts or folder not in path.parents or not path.is_file():
        raise InputError(f"model {folder}: shard {file!s:.200} is missing in this folder")
    return path


def _unindexed_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder without an index: all shards of a set, or a single file.

    Raises:
        InputError: if there are none, several sets or files, or an incomplete set.
    """
    for pattern in _PATTERNS:
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        sets = {match.groups() for path in files if (match := _SHARD.fullmatch(path.name))}
        if [len(files)] == ([int(count) for _, count in sets] or [1]):
            return files
        if files:
            names = ", ".join(path.name for path in files[:_MOST_NAMES])
            raise InputError(
                f"model {folder}: {names} are neither {_USUAL[0]} nor a complete set of shards; "
                f"download {_USUAL[1]} or the missing shards"
            )
    why = adapter_advice(folder) or "no *.safetensors or pytorch_model*.bin weights"
    raise InputError(f"model {folder}: {why}")
