"""Loads a model by name: PATH, bundled[:strong], hf:ORG/NAME or random:SHAPE.

*Precision.* On a GPU `--dtype auto` is bfloat16, or float16 if the GPU cannot multiply bfloat16. On
a CPU it is float32, except for large models with bfloat16 weights. With bfloat16, on a CPU that
supports it, such a model reads half the bytes and multiplies two to four times as fast. bfloat16 is
chosen only if its products are batch-invariant on this CPU, so that runs stay `exact`. On CPUs with
AMX tile units, bfloat16 products were measured not to be batch-invariant.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from beamwright.attention.kernels import has_matrix_units
from beamwright.errors import (
    DeviceMemoryError,
    InputError,
    UnavailableError,
    UnsupportedModelError,
    error_line,
    format_bytes,
    message_of,
)
from beamwright.models.adapted_weights import check_adapted, load_adapted
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.decoder import TILE_ROWS, Decoder, Linear
from beamwright.models.dense import DenseDecoder
from beamwright.models.digest import Digest, start_digest
from beamwright.models.formats import open_checkpoint
from beamwright.models.formats.files import read_config_file, read_quantisation
from beamwright.models.formats.gguf_metadata import gguf_remarks
from beamwright.models.formats.header import is_gguf
from beamwright.models.formats.key_tables import (
    CONFIGS,
    HARMLESS,
    QUANTISATION,
    KeyTable,
    nonempty_keys,
)
from beamwright.models.hf_config import config_of, read_shape
from beamwright.models.hub import resolve_folder
from beamwright.models.linear import make_packer, prepack_linear, quiet_import
from beamwright.models.named import limit_context, shape_from_text
from beamwright.models.native import library_accepts
from beamwright.models.offload import WeightOffload
from beamwright.models.shape import ModelShape
from beamwright.models.survey import survey_model
from beamwright.models.tokenizer import TextCodec
from beamwright.models.weights import (
    LoadOptions,
    check_weights,
    load_weights,
    random_weights,
    trim_heap,
    with_own_head,
)
from beamwright.plan.costs import Storage, library_storage, storage_of, weight_bytes
from beamwright.sections import ModelSettings

_log = logging.getLogger("beamwright.models")
LARGE_PARAMETERS = 100_000_000
_RANDOM_SEED = 0
_REFUSED = ("can't allocate memory", "not enough memory", "out of memory", "failed to map")
_DEVICES = ("cpu", "cuda")
_NATIVE = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "arm_bf16")
_ROWS = (8, 16, 64, 160)  # numbers of rows with which batch-invariance is probed
_READS_GGUF = ("accelerate", "gguf")  # packages with which `transformers` reads GGUF files
_SLOW = "GGUF models are slow on this CPU: reinstall beamwright with a C compiler for its kernels"


@dataclass(frozen=True)
class LoadedModel:
    """A loaded decoder, its tokenizer and its folder. Random models have only a decoder."""

    decoder: Decoder
    codec: TextCodec | None
    folder: Path | None
    # The format in which the layers' projections are in memory.
    storage: Storage = Storage.PLAIN
    # The digest of the folder's files, which a thread computes.
    digest: Future[Digest | None] | None = None
    # Warnings, one line each, about settings in the files that Beamwright ignores.
    remarks: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        """Maximum number of tokens of a path."""
        return self.decoder.shape.context

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self.decoder.shape.vocab


def load_model(
    spec: str,
    settings: ModelSettings,
    role: str = "generator",
    chat_template: str | None = None,
    template_args: Mapping[str, Any] = MappingProxyType({}),
    *,
    reads_logits: bool = True,
    offload: WeightOffload | None = None,
) -> LoadedModel:
    """Load the config, weights and tokenizer of a model.

    Args:
        spec: the model, as in `--model`.
        settings: the options of `--device`, `--dtype`, `--weights` and others.
        role: "generator" or "verifier".
        chat_template: a Jinja template or the path of one; None: the tokenizer's own.
        template_args: arguments of the template.
        reads_logits: whether to load the LM head; False for a verifier with its own score head.
        offload: takes the weights of layers that do not stay on the device; None: all layers stay.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: if the model cannot be loaded; the
            message says why.
    """
    device = check_device(settings.device)
    # Read only the config first, so that errors appear before gigabytes are downloaded or read.
    folder = None if spec.startswith("random:") else resolve_folder(spec, role, weights=False)
    shape = replace(_shape(spec, folder, settings, role), has_lm_head=reads_logits)
    dtype, storage = resolve_precision(settings, shape, role)
    kernels = settings.attention != "reference"
    pack = make_packer(storage, dtype, device, fixed=settings.deterministic, kernels=kernels)
    codec, digest = None, None
    remarks: tuple[str, ...] = ()
    if folder is None:
        weights = random_weights(shape, dtype, device, _RANDOM_SEED, storage, pack, offload)
    else:
        codec = TextCodec.load(folder, chat_template, template_args)
        folder = resolve_folder(spec, role)
        digest = start_digest(folder)
        remarks = _remarks(folder, codec)
        if storage is Storage.STORED and shape.blocks and not library_accepts(torch.float32):
            remarks += (_SLOW,) * (device == "cpu")
    tile = TILE_ROWS if settings.deterministic else None
    placing = LoadOptions(
        dtype, device, storage, pack, reads_logits, tile, role == "verifier", offload
    )
    decoder: Decoder
    if shape.built is not None and folder is not None:
        surveyed = survey_model(config_of(folder), dtype)
        load_adapted(surveyed, open_checkpoint(folder), placing, str(folder))
        if offload is not None:
            offload.close_loading()
        decoder = AdaptedDecoder(surveyed, shape, dtype, tile, offload)
    else:
        if folder is not None:
            shape, weights = load_weights(folder, shape, placing)
        if offload is not None:
            offload.close_loading()
        decoder = DenseDecoder(shape, weights, tile, kernels=kernels)
        decoder.offload = offload
    if settings.kv_dtype != "auto":
        decoder.set_kv_dtype(settings.kv_dtype)
    trim_heap()
    for line in remarks:
        _log.warning("beamwright: %s", line)
    return LoadedModel(decoder, codec, folder, storage, digest, remarks)


def _remarks(folder: Path, codec: TextCodec) -> tuple[str, ...]:
    """Return warnings, one line each, about settings in a model's files that are ignored."""
    if is_gguf(folder):
        return (*gguf_remarks(folder), *codec.remarks)
    written, where = read_config_file(folder), f"model {folder}"
    if (table := CONFIGS.get(written["model_type"])) is None:
        # Assume that a `transformers` model reads every attribute of its config class.
        config = config_of(folder)
        known = {*vars(type(config)()), *config.attribute_map, *CONFIGS["llama"].used}
        known.add("per_layer_config")
        table = KeyTable("config.json", (*known, *(f"{key}.*" for key in known)), HARMLESS)
    method = QUANTISATION.check(nonempty_keys(read_quantisation(written) or {}), where)
    return (*table.check(nonempty_keys(written), where), *method, *codec.remarks)


def _shape(spec: str, folder: Path | None, settings: ModelSettings, role: str) -> ModelShape:
    if folder is None:
        shape = shape_from_text(spec.removeprefix("random:"))
        if shape.built is not None:
            raise InputError(
                f"{spec}: transformers builds this model; pass a folder with its config.json"
            )
        return limit_context(shape, settings.context)
    return read_shape(folder, settings.context, role, settings.decoder)


def resolve_precision(
    settings: ModelSettings, shape: ModelShape, role: str
) -> tuple[torch.dtype, Storage]:
    """Resolve `--dtype` and `--weights` (or `--verifier-weights`) for a model in this `role`.

    Return the dtype, and the storage format of the layers' projections.
    """
    weights = settings.weights if role == "generator" else settings.verifier_weights
    storage = storage_of(weights, is_packed=shape.packed is not None)
    fixed = (
        storage is Storage.STORED and shape.is_gguf_quantised and library_accepts(torch.bfloat16)
    )
    dtype = resolve_dtype(settings.dtype, settings.device, shape, fixed=fixed)
    own = settings.device == "cpu" and library_accepts(dtype)
    return dtype, library_storage(storage, shape) if own else storage


def inspect_model(settings: ModelSettings) -> dict[str, Any]:
    """Return the report of `doctor --model`. Of the weights, only names and sizes are read.

    Raises:
        UnsupportedModelError: if the model could not be loaded.
    """
    folder = None if settings.is_random else resolve_folder(settings.model, "generator")
    shape = _shape(settings.model, folder, settings, "generator")
    codec: TextCodec | None = None
    remarks: tuple[str, ...] = ()
    if folder is not None:
        try:
            stored = open_checkpoint(folder)
            if shape.built is None:
                shape = with_own_head(shape, stored)
                check_weights(stored, shape, str(folder))
            else:
                unread = LoadOptions(torch.float32, "meta")
                check_adapted(survey_model(config_of(folder)), stored, str(folder), unread)
            codec = TextCodec.load(folder)
            remarks = _remarks(folder, codec)
        except InputError as error:
            raise UnsupportedModelError(str(error)) from error
    dtype, storage = resolve_precision(settings, shape, "generator")
    states = {
        "recurrent_layers": len({part.layer for part in shape.states}),
        "state_bytes_per_row": shape.state_bytes(dtype.itemsize),
    }
    return {
        "architecture": shape.architecture,
        "decoder": "own" if shape.built is None else "transformers",
        "parameters": shape.num_parameters,
        "active_parameters": shape.active_parameters,
        "weights": str(storage),
        "weight_bytes": weight_bytes(shape, dtype.itemsize, storage),
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype.itemsize, settings.kv_dtype),
        **(states if shape.states else {}),
        "dtype": str(dtype).removeprefix("torch."),
        "context": shape.context,
        "chat_template": codec is not None and codec.chat_template is not None,
        "remarks": list(remarks),
        "supported": True,
    }


def check_device(device: str) -> str:
    """Check that `device` exists, and return it.

    A CUDA device that is given with a number becomes the current device.

    Raises:
        InputError: if `device` is not a device, not supported, or not on this machine.
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
        raise InputError(f"--device {device}: only {torch.cuda.device_count()} CUDA devices exist")
    if kind == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(torch.device(device))  # kernels are launched on the current device
    return device


def load_reference_model(place: Path, dtype: torch.dtype) -> Any:
    """Load a folder or GGUF file with `transformers` alone, to check Beamwright's results.

    Raises:
        UnavailableError: if `transformers` cannot read the model, does not find one of its weights,
            or ignores a weight of a module.
    """
    why, folder, file = "", place, {}
    if is_gguf(place):
        folder, file = place.parent, {"gguf_file": place.name}
        if any(find_spec(name) is None for name in _READS_GGUF):
            why = f"it needs pip install {' '.join(_READS_GGUF)}"
    how = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": False, **file}
    try:
        with quiet_import():  # `transformers` imports torchao if it is installed
            from transformers import AutoModelForCausalLM  # noqa: PLC0415 (slow import)

            if not why:
                read = AutoModelForCausalLM.from_pretrained
                model, info = read(folder, output_loading_info=True, **how)
                why = _unloaded_weight(model, info)
    except Exception as error:  # `transformers` and its readers may raise anything
        why = message_of(error) if isinstance(error, ImportError) else error_line(error)
    if why:
        line = "transformers, with which --parity compares, cannot read this checkpoint"
        raise UnavailableError(f"{place}: {line} ({why.rstrip('.')})")
    return model


def _unloaded_weight(model: Any, info: Mapping[str, Collection[str]]) -> str:
    """Return a message about a weight that `transformers` did not find or did not use.

    Return "" if all weights of its modules are loaded. info: the result of `output_loading_info`.
    """
    if info["missing_keys"]:
        return f"it does not find {min(info['missing_keys'])}"
    known = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    unused = [name for name in info["unexpected_keys"] if name.rpartition(".")[0] in known]
    return f"it does not use {min(unused)}" if unused else ""


# --- the device's memory ---------------------------------------------------------------------


def cap_memory(name: str, limit_bytes: int | None) -> None:
    """Limit the memory that torch may allocate on a GPU in this process; None: no limit.

    An allocation beyond the limit raises OutOfMemoryError. The driver's context (about 0.5 GB) is
    outside the allocator and does not count. name: the device; on a CPU nothing is limited.

    Raises:
        InputError: if the GPU has less memory than `limit_bytes`.
    """
    device = torch.device(name)
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    gc.collect()  # dropped models are in reference cycles, which still hold their weights
    index = torch.cuda.current_device() if device.index is None else device.index
    if limit_bytes is None:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        return
    total = torch.cuda.get_device_properties(index).total_memory
    if limit_bytes > total:
        raise InputError(
            f"--memory is {format_bytes(limit_bytes)}, but {device} has {format_bytes(total)}; "
            "lower --memory"
        )
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total, index)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that an allocation failed, on a GPU or on the host.

    On a CPU torch raises a plain RuntimeError, which only its message identifies.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _REFUSED)


def make_free_memory_reader(device: torch.device) -> Callable[[], int] | None:
    """Return a function that measures how many bytes of a GPU are free now; None for a CPU."""
    if device.type != "cuda":
        return None
    # Some functions of torch do not accept "cuda" without a number.
    index = torch.cuda.current_device() if device.index is None else device.index

    def free() -> int:
        on_card, total = torch.cuda.mem_get_info(index)
        reserved = torch.cuda.memory_reserved(index)
        used = torch.cuda.memory_allocated(index)
        cap = int(torch.cuda.get_per_process_memory_fraction(index) * total)
        # The allocator can reserve more up to its cap, and can reuse its own idle blocks.
        return max(0, min(on_card, cap - reserved)) + reserved - used

    return free


# --- precision -------------------------------------------------------------------------------


def resolve_dtype(name: str, device: str, shape: ModelShape, *, fixed: bool = False) -> torch.dtype:
    """Return the dtype for a model on `device`. name: the value of `--dtype`.

    With "auto" on a CPU, products in bfloat16 may be probed for batch-invariance.
    fixed: True if the model's products are batch-invariant by construction.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device != "cpu":
        return torch.bfloat16 if has_matrix_units(torch.device(device)) else torch.float16
    is_large = shape.num_parameters >= LARGE_PARAMETERS
    faster = shape.stored_bfloat16 and is_large and has_bfloat16()
    exact = faster and (fixed or products_are_invariant(shape.matrices, torch.bfloat16))
    return torch.bfloat16 if exact else torch.float32


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU can multiply bfloat16 natively; False if torch cannot tell."""
    known = getattr(torch.cpu, "get_capabilities", dict[str, object])
    try:
        capabilities = known()
    except RuntimeError:
        return False
    return any(capabilities.get(name) is True for name in _NATIVE)


@cache
def products_are_invariant(matrices: tuple[tuple[int, int, int], ...], dtype: torch.dtype) -> bool:
    """Return whether products with weights of these sizes are batch-invariant on this CPU.

    matrices: (rows, columns, count) of the weights.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, columns, _ in matrices:
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        product = prepack_linear(Linear(weight))
        x = torch.randn(_ROWS[-1], columns, generator=generator).to(dtype)
        whole = product(x)
        if not all(torch.equal(product(x[:count]), whole[:count]) for count in _ROWS):
            return False
    return True


@contextmanager
def convert_memory_errors(what: str, *hint: str) -> Iterator[None]:
    """Turn a failed allocation in the `with` body into a DeviceMemoryError.

    what: the part of the message that says what cannot be done. hint: advice to the user.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(what, *hint) from error
