"""The one reader of Hugging Face configs: from `config.json` to a ModelShape.

Raises UnsupportedModelError, with the list of what is supported, for anything that would make the
decoder compute something else than the checkpoint means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from beamwright.errors import UnsupportedModelError
from beamwright.models.shape import ModelShape

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
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "vocab_size",
    "max_position_embeddings",
)
_KIND = ("model_type", "quantization_config", "compression_config", "auto_map")
_LARGEST = 2**31 - 1
_WIDEST_HEAD = 2**14
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class NotBuiltError(UnsupportedModelError):
    """Another engine may well run this model."""


def shape_from_config(config: Any, max_context: int | None = None) -> ModelShape:
    """The shape of a `transformers` config.

    max_context: the most tokens that will be used; a sliding window that is at least as long
    does not matter and is accepted.

    Raises:
        UnsupportedModelError: for another architecture, or an option that is not implemented
        (NotBuiltError), or values that make no model.
    """
    check_kind({name: getattr(config, name, None) for name in _KIND})
    kind = config.model_type
    _check_heads(config)
    context = config.max_position_embeddings
    if max_context is not None:
        context = min(context, max_context)
    _check_window(config, kind, context)
    shape = _check_shape(FAMILIES[kind](config, context))
    return replace(shape, stored_bfloat16=str(_dtype(config)).endswith("bfloat16"))


def check_kind(values: Mapping[str, Any]) -> None:
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


def _dtype(config: Any) -> Any:
    """Of the checkpoint: newer configs say `dtype`, older ones `torch_dtype`."""
    return getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)


def check_counts(values: Mapping[str, Any]) -> None:
    """Counts and widths are counts and widths, where they are given.

    Raises:
        UnsupportedModelError: that names the first that is not.
    """
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


def _check_heads(config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not 1 <= head_dim <= _WIDEST_HEAD:  # as many rotary frequencies are computed
        raise UnsupportedModelError(
            f"config.json: head_dim must be from 1 to {_WIDEST_HEAD:,}, not {head_dim:,}"
        )


def _check_shape(shape: ModelShape) -> ModelShape:
    """What follows from the numbers is usable, too."""
    if shape.inv_freq and len(shape.inv_freq) * 2 != shape.head_dim:
        raise UnsupportedModelError(f"config.json: an odd head_dim ({shape.head_dim})")
    numbers = {"rope": (*shape.inv_freq, shape.rope_scale), "rms_norm_eps": (shape.norm_eps,)}
    for name, values in numbers.items():
        if not all(isinstance(v, float | int) and math.isfinite(v) and v >= 0 for v in values):
            raise UnsupportedModelError(f"config.json: its {name} gives no finite numbers")
    return shape


def supported() -> str:
    """What the decoder can run, for error messages."""
    return (
        f"supported: {', '.join(FAMILIES)} with dense layers, full attention, "
        f"rope types {', '.join(_ROPE_TYPES)}, unquantised weights"
    )


def _check_window(config: Any, kind: str, context: int) -> None:
    window = getattr(config, "sliding_window", None)
    if kind in ("qwen2", "qwen3") and not getattr(config, "use_sliding_window", False):
        return
    if kind == "opt" or window is None or window >= context:
        return
    raise NotBuiltError(
        f"a sliding window of {window} tokens is not supported inside a context of {context}: "
        f"use --context {window} or less; {supported()}"
    )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise NotBuiltError(f"activation {name!r} is not supported; {supported()}")
    return _ACTIVATIONS[name]


def _rotary(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the cos/sin scale, computed by transformers' own rope table."""
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise NotBuiltError(f"rope type {kind!r} is not supported; {supported()}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotBuiltError(f"partial rotary positions are not supported; {supported()}")
    if kind == "default":
        base = float(rope.get("rope_theta", 10_000.0))
        freq = [base ** -(2 * i / head_dim) for i in range(head_dim // 2)]
        return tuple(freq), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 (slow import)

    freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return tuple(freq.double().tolist()), float(scale)


def _llama_like(config: Any, context: int, **flags: Any) -> ModelShape:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inv_freq, rope_scale = _rotary(config, head_dim)
    return ModelShape(
        architecture=config.model_type,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        context=context,
        full_context=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=_activation(config.hidden_act),
        tied=bool(config.tie_word_embeddings),
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        **flags,
    )


def _llama(config: Any, context: int) -> ModelShape:
    bias = bool(getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    return _llama_like(config, context, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Any, context: int) -> ModelShape:
    return _llama_like(config, context)


def _qwen2(config: Any, context: int) -> ModelShape:
    return _llama_like(config, context, qkv_bias=True)


def _qwen3(config: Any, context: int) -> ModelShape:
    bias = bool(getattr(config, "attention_bias", False))
    return _llama_like(config, context, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _opt(config: Any, context: int) -> ModelShape:
    heads = config.num_attention_heads
    bias = bool(config.enable_bias)
    pre_norm = bool(config.do_layer_norm_before)
    return ModelShape(
        architecture="opt",
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=config.hidden_size // heads,
        intermediate=config.ffn_dim,
        vocab=config.vocab_size,
        context=context,
        full_context=config.max_position_embeddings,
        norm_eps=1e-5,
        norm="layer",
        norm_affine=bool(config.layer_norm_elementwise_affine),
        pre_norm=pre_norm,
        final_norm=pre_norm and not getattr(config, "_remove_final_layer_norm", False),
        activation=_activation(config.activation_function),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=bool(config.tie_word_embeddings),
        embed_dim=config.word_embed_proj_dim,
        learned_positions=2,
    )


FAMILIES: dict[str, Callable[[Any, int], ModelShape]] = {
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
