"""From `PATH | bundled[:strong] | hf:ORG/NAME | random:SHAPE` to a decoder and its tokenizer.

*Precision.* `--dtype auto` is float32 on a CPU, but for large models that lose nothing. On a card
it is bfloat16, or float16 where the card does not multiply that. In bfloat16 a large model reads
half the bytes and multiplies two to four times as fast, where the CPU has it. It is taken only if
a row's bits do not depend on the batch there, so `exact` is kept; on CPUs that multiply tiles (AMX)
they were seen to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from beamwright.attention.kernels import has_matrix_units
from beamwright.errors import InputError, UnsupportedModelError
from beamwright.models.config import read_shape
from beamwright.models.decoder import TILE_ROWS, Decoder, Linear
from beamwright.models.find import resolve_folder
from beamwright.models.linear import packer, prepack, quiet_import, storage_for
from beamwright.models.shape import ModelShape, capped, shape_from_text
from beamwright.models.tokenizer import TextCodec
from beamwright.models.weights import load_weights, random_weights
from beamwright.plan.costs import Storage, weight_bytes
from beamwright.sections import ModelSettings

LARGE_PARAMETERS = 100_000_000
_RANDOM_SEED = 0
_DEVICES = ("cpu", "cuda")
_NATIVE = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "arm_bf16")
_ROWS = (8, 16, 64, 160)


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
        try:
            load_weights(folder, shape, torch.float32, "meta")
            TextCodec.load(folder)
        except InputError as error:
            raise UnsupportedModelError(str(error)) from error
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


def read_reference(folder: Path, dtype: torch.dtype) -> Any:
    """The folder's model as `transformers` builds it, to compare with; no bar is drawn."""
    with quiet_import():  # it imports torchao, if that is installed
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 (slow import)
        from transformers.utils import logging as shown  # noqa: PLC0415 (slow import)

        drew_bars = shown.is_progress_bar_enabled()
        shown.disable_progress_bar()
        try:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
            )
        finally:
            if drew_bars:
                shown.enable_progress_bar()


# --- precision -------------------------------------------------------------------------------


def resolve_dtype(name: str, device: str, shape: ModelShape) -> torch.dtype:
    """The dtype that `--dtype` means for a model on a device; it probes the CPU where it has to."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device != "cpu":
        return torch.bfloat16 if has_matrix_units(torch.device(device)) else torch.float16
    exact = is_faster_in_bfloat16(shape) and products_are_invariant(
        shape.projections, torch.bfloat16
    )
    return torch.bfloat16 if exact else torch.float32


def why_float32(shape: ModelShape) -> str | None:
    """One line for whom bfloat16 would be faster on this CPU; None where it is used, or is not."""
    if not is_faster_in_bfloat16(shape):
        return None
    if products_are_invariant(shape.projections, torch.bfloat16):
        return None
    return (
        "--dtype bfloat16 is faster on this CPU and what the checkpoint is in, but a token's last "
        "bits depend on its batch there (exact: false)"
    )


def is_faster_in_bfloat16(shape: ModelShape) -> bool:
    """A large checkpoint that is in bfloat16, on a CPU that multiplies it."""
    is_large = shape.num_parameters >= LARGE_PARAMETERS
    return shape.stored_bfloat16 and is_large and has_bfloat16()


@cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; False where torch does not say."""
    known = getattr(torch.cpu, "get_capabilities", dict[str, object])
    try:
        found = known()
    except RuntimeError:
        return False
    return any(found.get(name) is True for name in _NATIVE)


@cache
def products_are_invariant(projections: tuple[tuple[int, int], ...], dtype: torch.dtype) -> bool:
    """Whether rows of products [out, in] have the same bits at any batch, as they run on a CPU."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in projections:
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        product = prepack(Linear(weight))
        x = torch.randn(_ROWS[-1], columns, generator=generator).to(dtype)
        whole = product(x)
        if not all(torch.equal(product(x[:count]), whole[:count]) for count in _ROWS):
            return False
    return True
