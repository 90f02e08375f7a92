"""From `PATH | bundled[:strong] | hf:ORG/NAME | random:SHAPE` to a decoder and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.models.decoder import TILE_ROWS, Decoder
from beamwright.models.find import capped, read_shape, resolve_folder
from beamwright.models.named_shapes import shape_from_text
from beamwright.models.precision import resolve_dtype, why_float32
from beamwright.models.quantised import packer, storage_for
from beamwright.models.shape import ModelShape
from beamwright.models.tokenizer import TextCodec
from beamwright.models.weights import load_weights, random_weights
from beamwright.plan.costs import Storage, weight_bytes
from beamwright.sections import ModelSettings

_RANDOM_SEED = 0
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, its tokenizer and its folder; random shapes have neither of the latter.

    storage: how the projections of its layers are kept.
    """

    decoder: Decoder
    codec: TextCodec | None
    folder: Path | None
    storage: Storage = Storage.PLAIN

    @property
    def context(self) -> int:
        """Most tokens of a path."""
        return self.decoder.shape.context

    @property
    def vocab(self) -> int:
        """Token ids that it knows."""
        return self.decoder.shape.vocab


def load_model(
    spec: str,
    settings: ModelSettings,
    role: str = "generator",
    chat_template: str | None = None,
    *,
    reads_logits: bool = True,
) -> LoadedModel:
    """Read config, weights and tokenizer.

    reads_logits: False for a verifier with a head of its own: its LM head is not loaded.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: with one line that says why.
    """
    device = check_device(settings.device)
    tile = TILE_ROWS if settings.deterministic else None
    if spec.startswith("random:"):
        shape = capped(shape_from_text(spec.removeprefix("random:")), settings.context)
        dtype = resolve_dtype(settings.dtype, settings.device, shape)
        storage = _storage(settings, dtype, role)
        pack = packer(storage, dtype, device)
        weights = random_weights(shape, dtype, device, _RANDOM_SEED, storage, pack)
        return LoadedModel(Decoder(shape, weights, tile), None, None, storage)
    # What is wrong is said before gigabytes are downloaded or read.
    folder = resolve_folder(spec, role, weights=False)
    shape = replace(read_shape(folder, settings.context, role), has_lm_head=reads_logits)
    dtype = resolve_dtype(settings.dtype, settings.device, shape)
    storage = _storage(settings, dtype, role)
    codec = TextCodec.load(folder, chat_template)
    folder = resolve_folder(spec, role)
    pack = packer(storage, dtype, device)
    weights = load_weights(folder, shape, dtype, device, storage=storage, pack=pack)
    return LoadedModel(Decoder(shape, weights, tile), codec, folder, storage)


def _storage(settings: ModelSettings, dtype: torch.dtype, role: str) -> Storage:
    if role == "verifier":
        return storage_for(settings.verifier_weights, dtype, settings.device, "--verifier-weights")
    return storage_for(settings.weights, dtype, settings.device, "--weights")


def inspect_model(settings: ModelSettings) -> dict[str, Any]:
    """What `doctor --model` reports; reads no weights, but their names and shapes.

    Raises:
        UnsupportedModelError: if the decoder cannot run it, or it would not load.
    """
    if settings.model.startswith("random:"):
        shape = capped(shape_from_text(settings.model.removeprefix("random:")), settings.context)
    else:
        folder = resolve_folder(settings.model, "generator")
        shape = read_shape(folder, settings.context)
        _check_loads(folder, shape)
    dtype = resolve_dtype(settings.dtype, settings.device, shape)
    storage = _storage(settings, dtype, "generator")
    return {
        "architecture": shape.architecture,
        "parameters": shape.num_parameters,
        "weights": str(storage),
        "weight_bytes": weight_bytes(shape, dtype.itemsize, storage),
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype.itemsize),
        "dtype": str(dtype).removeprefix("torch."),
        "dtype_note": why_float32(shape) if settings.dtype == "auto" else None,
        "context": shape.context,
        "supported": True,
    }


def _check_loads(folder: Path, shape: ModelShape) -> None:
    try:
        load_weights(folder, shape, torch.float32, "meta")
        TextCodec.load(folder)
    except InputError as error:
        raise UnsupportedModelError(str(error)) from error


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
