"""A checkpoint's config.json as a ModelShape.

The one reader of Hugging Face configs. Raises UnsupportedModelError, with the list of what is
supported, for anything that would make the decoder compute something else than the checkpoint
means. A folder holds data: code that it brings along (`auto_map`) is never run and never asked
about. Knows no weights, needs no torch; `transformers` is asked where config.json leaves something
to its defaults: importing it takes longer than everything else that a small model is loaded by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_regular
from beamwright.models.shape import FAMILIES, ModelShape, frequencies

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# The names of all families; what a family does not have is not looked for.
_COUNTS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "intermediate_size", "ffn_dim", "word_embed_proj_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_LARGEST = 2**31 - 1
_WIDEST_HEAD = 2**14
_LONGEST_LINE = 200
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ELSEWHERE = (
    "--model vllm:PATH or --model openai:URL#NAME (a server that runs it) takes it today, with "
    "tree and verifier here"
)
_NEEDED = frozenset(
    (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "hidden_act", "tie_word_embeddings",
    )
)  # fmt: skip
_KNOWN = _NEEDED | frozenset(
    (
        "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "architectures", "dtype",
        "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
        "attention_dropout", "attention_bias", "mlp_bias", "pretraining_tp", "use_cache",
        "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
        "transformers_version",
    )
)  # fmt: skip
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")


class NotBuiltError(UnsupportedModelError):
    """Another engine may well run this model."""


def supported() -> str:
    """What the decoder can run, for error messages."""
    return (
        f"supported: {', '.join(FAMILIES)} with dense layers, full attention, "
        f"rope types {', '.join(_ROPE_TYPES)}, unquantised weights"
    )


def read_object(file: Path) -> dict[str, Any]:
    """Raises InputError if the file does not hold a JSON object."""
    try:
        written = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({line_of(error)})") from error
    if not isinstance(written, dict):
        raise InputError(f"{file}: a JSON object is expected, not {type(written).__name__}")
    return written


def line_of(error: BaseException) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST_LINE]


def brings_code(written: Mapping[str, Any], kind: str) -> bool:
    """True if a file names a class of the folder's own for this."""
    named = written.get("auto_map")
    return isinstance(named, list | tuple) or (isinstance(named, dict) and kind in named)


def read_shape(folder: Path, max_context: int | None, role: str = "generator") -> ModelShape:
    """The shape in a folder's config.json.

    max_context: the most tokens that will be used; a sliding window that is at least as long
    does not matter and is accepted.

    Raises:
        UnsupportedModelError: for another architecture, or an option that is not implemented, or
        values that make no model.
    """
    try:
        written = read_object(folder / "config.json")
        _check_counts(written)
        if isinstance(written.get("model_type"), str):
            _check_kind(written)  # before the slow imports that the rest may need
        config = _plain_config(written) or _config_by_transformers(folder, written)
        return _shape_of(config, max_context)
    except NotBuiltError as error:
        way = f"; {_ELSEWHERE}" if role == "generator" else ""
        raise UnsupportedModelError(f"model {folder}: {error}{way}") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {folder}: {error}") from error
    except InputError as error:
        raise UnsupportedModelError(f"config cannot be read: {error}; {supported()}") from error
    except Exception as error:  # a value of a kind that no rule here foresees
        raise UnsupportedModelError(
            f"model {folder}: config.json holds what no model can be made of ({line_of(error)})"
        ) from error


def _plain_config(written: Mapping[str, Any]) -> Any | None:
    """What config.json says, where it says all that a shape is read from; None if it takes more."""
    rope = {"rope_type": "default", "rope_theta": written.get("rope_theta")}
    rope = written.get("rope_parameters", rope)
    is_plain = (
        written.get("model_type") in ("llama", "qwen2", "qwen3")
        and written.keys() >= _NEEDED
        and written.keys() <= _KNOWN
        and isinstance(rope, dict)
        and {**rope, "rope_theta": None} == {"rope_type": "default", "rope_theta": None}
        and type(rope["rope_theta"]) in (int, float)
        and ("rope_theta" in written) != ("rope_parameters" in written)
        and written.get("rope_scaling") is None
        and not written.get("use_sliding_window")
        and None not in [written[name] for name in _NEEDED]
        and all(type(written.get(name, False)) is bool for name in _SWITCHES)
        and written["hidden_size"] % written["num_attention_heads"] == 0
        # A head has a width of its own there.
        and (written["model_type"] != "qwen3" or "head_dim" in written)
    )
    return SimpleNamespace(**{**written, "rope_parameters": rope}) if is_plain else None


def _config_by_transformers(folder: Path, written: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 (slow import)

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds; each is about what the file says
        if brings_code(written, "AutoConfig"):
            raise UnsupportedModelError(f"{wants_to_run('config.json')}; {supported()}") from error
        raise UnsupportedModelError(
            f"config cannot be read ({line_of(error)}); {supported()}"
        ) from error


def wants_to_run(name: str) -> str:
    """What is wrong with a folder whose file of that name stands for code."""
    return f"this folder wants to run its own code (auto_map in {name}), which is never done"


def read_eos_ids(folder: Path) -> frozenset[int]:
    """The token ids that end a reply, as generation_config.json or else config.json has them.

    Raises:
        InputError: if one of the files is not a JSON object.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = read_object(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return frozenset(index for index in ids if type(index) is int and index >= 0)
    return frozenset()


# --- from a config to a shape ----------------------------------------------------------------


def _shape_of(config: Any, max_context: int | None) -> ModelShape:
    names = ("model_type", "quantization_config", "compression_config", "auto_map")
    _check_kind({name: getattr(config, name, None) for name in names})
    family, heads = FAMILIES[config.model_type], config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not 1 <= head_dim <= _WIDEST_HEAD:  # as many rotary frequencies are computed
        raise UnsupportedModelError(
            f"config.json: head_dim must be from 1 to {_WIDEST_HEAD:,}, not {head_dim:,}"
        )
    context = config.max_position_embeddings
    if max_context is not None:
        context = min(context, max_context)
    window = family.window(config)
    if window is not None and window < context:
        raise NotBuiltError(
            f"a sliding window of {window} tokens is not supported inside a context of {context}: "
            f"use --context {window} or less; {supported()}"
        )
    fields = {
        "intermediate": getattr(config, "intermediate_size", None),
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "tied": bool(config.tie_word_embeddings),
        **family.flags(config),
    }
    if fields["activation"] not in _ACTIVATIONS:
        raise NotBuiltError(f"activation {fields['activation']!r} is not supported; {supported()}")
    fields["activation"] = _ACTIVATIONS[fields["activation"]]
    if "learned_positions" not in fields:
        fields["inv_freq"], fields["rope_scale"] = _rotary(config, head_dim)
    # Newer configs say `dtype`, older ones `torch_dtype`.
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    shape = ModelShape(
        architecture=config.model_type,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        context=context,
        full_context=config.max_position_embeddings,
        stored_bfloat16=str(dtype).endswith("bfloat16"),
        **fields,
    )
    _check_numbers(shape)
    return shape


def _check_kind(values: Mapping[str, Any]) -> None:
    """An architecture that the decoder has, with weights as they were trained.

    Raises:
        NotBuiltError: if it is another one, or the weights are quantised.
    """
    kind = values.get("model_type")
    if kind not in FAMILIES:
        code = ", and the folder wants to run its own code (auto_map), which is never done"
        raise NotBuiltError(
            f"architecture {kind!r:.80} is not supported{code if values.get('auto_map') else ''}; "
            f"{supported()}"
        )
    quantised = values.get("quantization_config") or values.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise NotBuiltError(
            f"quantised weights are not supported ({method or 'of an unknown kind'!s:.20}): take "
            "the original checkpoint with --weights int4, a verifier's with --verifier-weights "
            f"int4; {supported()}"
        )


def _check_counts(values: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for the first count or width that is given and is none."""
    for name in _COUNTS:
        value = values.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= _LARGEST):
            raise UnsupportedModelError(
                f"config.json: {name} must be a whole number from 1 to {_LARGEST:,}, "
                f"not {value!r:.80}"
            )
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )


def _check_numbers(shape: ModelShape) -> None:
    """What follows from the numbers is usable, too."""
    if shape.inv_freq and len(shape.inv_freq) * 2 != shape.head_dim:
        raise UnsupportedModelError(f"config.json: an odd head_dim ({shape.head_dim})")
    numbers = {"rope": (*shape.inv_freq, shape.rope_scale), "rms_norm_eps": (shape.norm_eps,)}
    for name, values in numbers.items():
        if not all(isinstance(v, float | int) and math.isfinite(v) and v >= 0 for v in values):
            raise UnsupportedModelError(f"config.json: its {name} gives no finite numbers")


def _rotary(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the cos/sin scale, computed by transformers' own rope table."""
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise NotBuiltError(f"rope type {kind!r} is not supported; {supported()}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotBuiltError(f"partial rotary positions are not supported; {supported()}")
    if kind == "default":
        return frequencies(float(rope.get("rope_theta", 10_000.0)), head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 (slow import)

    freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return tuple(freq.double().tolist()), float(scale)
