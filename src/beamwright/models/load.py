"""From `PATH | bundled[:strong] | hf:ORG/NAME | random:SHAPE` to a decoder and its tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from beamwright.config import ModelSettings
from beamwright.cost import Storage, weight_bytes
from beamwright.errors import InputError, UnavailableError, UnsupportedModelError
from beamwright.models.decoder import TILE_ROWS, Decoder
from beamwright.models.hf_config import check_counts, shape_from_config, supported
from beamwright.models.json_file import read_object
from beamwright.models.named_shapes import NAMED_SHAPES, named_shape, shape_from_text
from beamwright.models.onednn import pack_weights
from beamwright.models.pretrained import read_config
from beamwright.models.quantised import storage_for
from beamwright.models.shape import ModelShape
from beamwright.models.tokenizer import TextCodec
from beamwright.models.weights import load_weights, random_weights

_RANDOM_SEED = 0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DEVICES = ("cpu", "cuda")
_BUNDLED = Path(__file__).parent.parent / "bundled"


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, its tokenizer and its folder; random shapes have neither of the latter.

    storage: how the projections of its layers are kept.
    """

    decoder: Decoder
    codec: TextCodec | None
    folder: Path | None
    storage: Storage = Storage.PLAIN


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """`auto` is float32 on CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_folder(spec: str, role: str, written: str | None = None, known: str = "") -> Path:
    """The checkpoint folder that `--model` or `--verifier` means.

    role: "generator" or "verifier", the bundled folder that `bundled` stands for;
    `bundled:strong` is the verifier's in either, whose backbone is a generator, too.
    written: the option's value where it says more than `spec`. known: what could be meant where
    there is no such folder.

    Raises:
        InputError: if there is no such folder; UnavailableError: if the hub cannot be reached.
    """
    if spec in ("bundled", "bundled:strong"):
        return _BUNDLED / (role if spec == "bundled" else "verifier")
    if spec.startswith("hf:"):
        return _download(spec.removeprefix("hf:"))
    folder = Path(spec)
    option = "model" if role == "generator" else role
    if not folder.is_dir():
        hint = _instead(spec, role) or (f"no such folder; {known}" if known else "no such folder")
        raise InputError(f"--{option} {written or spec}: {hint}")
    if not (folder / "config.json").is_file():
        packed = next(folder.glob("*.gguf"), None)
        hint = "" if packed is None else f"; {packed.name}: {_instead(str(packed), role)}"
        raise InputError(f"{spec}: no config.json in this folder{hint}")
    _check_files(folder)
    return folder


def _instead(spec: str, role: str) -> str | None:
    """What to give instead of a place that is no folder; None where nobody can tell."""
    place = Path(spec)
    if place.suffix.lower() == ".gguf":
        weights = "--weights" if role == "generator" else "--verifier-weights"
        return (
            "GGUF files are not read: give the folder or hf:ORG/NAME of the original checkpoint "
            f"(safetensors), with {weights} int4 to make it as small"
        )
    if place.is_file():
        return "a file; the checkpoint's folder is expected"
    if _HUB_NAME.fullmatch(spec) and not place.parent.is_dir():
        return f"no such folder; did you mean hf:{spec}?"
    return None


def _check_files(folder: Path) -> None:
    """A pipe among a model's files would be waited for, a device be read for ever."""
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise InputError(f"{file}: not a regular file")


def load_model(
    spec: str,
    settings: ModelSettings,
    role: str = "generator",
    chat_template: str | None = None,
    *,
    writes: bool = False,
) -> LoadedModel:
    """Read config, weights and tokenizer.

    writes: its LM head is needed, as a generator's always is; a verifier may have a head of its
    own and no other.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: with one line that says why.
    """
    dtype = resolve_dtype(settings.dtype, settings.device)
    device = check_device(settings.device)
    storage = _storage(settings, dtype, role)
    tile = TILE_ROWS if settings.deterministic else None
    if spec.startswith("random:"):
        shape = _capped(shape_from_text(spec.removeprefix("random:")), settings.context)
        weights = random_weights(shape, dtype, device, _RANDOM_SEED, storage)
        return LoadedModel(Decoder(shape, pack_weights(weights), tile), None, None, storage)
    folder = resolve_folder(spec, role)
    shape = read_shape(folder, settings.context)
    codec = TextCodec.load(folder, chat_template)  # what is wrong is said before gigabytes are read
    needs_logits = writes or role == "generator"
    weights = load_weights(folder, shape, dtype, device, need_lm_head=needs_logits, storage=storage)
    return LoadedModel(Decoder(shape, pack_weights(weights), tile), codec, folder, storage)


def _storage(settings: ModelSettings, dtype: torch.dtype, role: str) -> Storage:
    if role == "verifier":
        return storage_for(settings.verifier_weights, dtype, settings.device, "--verifier-weights")
    return storage_for(settings.weights, dtype, settings.device, "--weights")


def read_shape(folder: Path, max_context: int | None) -> ModelShape:
    """The shape in a folder's config.json."""
    try:
        check_counts(read_object(folder / "config.json"))
        config = read_config(folder, supported())
        return shape_from_config(config, max_context)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {folder}: {error}") from error
    except InputError as error:
        raise UnsupportedModelError(f"config cannot be read: {error}; {supported()}") from error
    except Exception as error:  # a value of a kind that no rule here foresees
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnsupportedModelError(
            f"model {folder}: config.json holds what no model can be made of ({line})"
        ) from error


def find_shape(
    settings: ModelSettings, role: str = "generator", written: str | None = None, known: str = ""
) -> ModelShape:
    """The shape that `--model` means; the name of a known model will do. Reads no weights.

    role, written, known: as in `resolve_folder`.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model would.
    """
    spec = settings.model
    shape = None if Path(spec).is_dir() else named_shape(spec)
    if shape is None and spec.startswith("random:"):
        shape = shape_from_text(spec.removeprefix("random:"))
    if shape is not None:
        return _capped(shape, settings.context)
    shapes = "" if "/" in (written or spec) else f"shapes: {', '.join(NAMED_SHAPES)}"
    hint = "; ".join(filter(None, (known, shapes)))
    return read_shape(resolve_folder(spec, role, written, hint), settings.context)


def inspect_model(settings: ModelSettings) -> dict[str, Any]:
    """What `doctor --model` reports; reads no weights, but their names and shapes.

    Raises:
        UnsupportedModelError: if the decoder cannot run it, or it would not load.
    """
    if settings.model.startswith("random:"):
        shape = _capped(shape_from_text(settings.model.removeprefix("random:")), settings.context)
    else:
        folder = resolve_folder(settings.model, "generator")
        shape = read_shape(folder, settings.context)
        _check_loads(folder, shape)
    dtype = resolve_dtype(settings.dtype, settings.device)
    storage = _storage(settings, dtype, "generator")
    return {
        "architecture": shape.architecture,
        "parameters": shape.num_parameters,
        "weights": str(storage),
        "weight_bytes": weight_bytes(shape, dtype.itemsize, storage),
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype.itemsize),
        "dtype": str(dtype).removeprefix("torch."),
        "context": shape.context,
        "supported": True,
    }


def _check_loads(folder: Path, shape: ModelShape) -> None:
    try:
        load_weights(folder, shape, torch.float32, "meta")
        TextCodec.load(folder)
    except InputError as error:
        raise UnsupportedModelError(str(error)) from error


def _capped(shape: ModelShape, max_context: int | None) -> ModelShape:
    if max_context is None:
        return shape
    return replace(shape, context=min(shape.context, max_context))


def check_device(device: str) -> str:
    """The same, if there is such a device.

    Raises:
        InputError: if it is no device, or none of its kind is here.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"--device {device!r} is not a device") from error
    if kind not in _DEVICES:
        raise InputError(f"--device {device}: models run on {' and '.join(_DEVICES)} only")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: no CUDA device is available here; use --device cpu")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices")
    if kind == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(torch.device(device))  # kernels are launched on the current one
    return device


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow import)

    patterns = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.model", "*.jinja", "*.txt"]
    patterns += ["verifier.yaml", "judge.yaml"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds, network and not-found alike
        line = " ".join(str(error).split())[:160]
        raise UnavailableError(
            f"hf:{name}: cannot be downloaded ({type(error).__name__}: {line}); "
            "without a network, pass a local folder"
        ) from error
