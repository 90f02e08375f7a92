"""A config.json that needs no `transformers` to be understood: every key in it is known here.

Importing the config classes of `transformers` takes longer than everything else that a small model
is loaded by. A file with any other key, kind of value or architecture is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

_Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _share(value: Any) -> bool:
    return type(value) is float and 0 <= value <= 1


def _theta(value: Any) -> bool:
    return type(value) in (int, float) and 1 <= value <= 1e12


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return type(value) is str


def _nothing(value: Any) -> bool:
    return value is None


def _names(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


def _token_id(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _token_ids(value: Any) -> bool:
    return _token_id(value) or (type(value) is list and all(type(each) is int for each in value))


def _dtype(value: Any) -> bool:
    return value in ("float16", "bfloat16", "float32")


def _rope(value: Any) -> bool:
    keys = {"rope_theta", "rope_type"}
    named = type(value) is dict and value.keys() == keys and value["rope_type"] == "default"
    return named and _theta(value["rope_theta"])


# What a shape is made of; all must be there, so that nobody's default is asked for.
_NEEDED: Mapping[str, _Check] = MappingProxyType(
    {
        "model_type": _text,
        "vocab_size": _count,
        "hidden_size": _count,
        "intermediate_size": _count,
        "num_hidden_layers": _count,
        "num_attention_heads": _count,
        "num_key_value_heads": _count,
        "max_position_embeddings": _count,
        "rms_norm_eps": lambda value: type(value) is float and value > 0,
        "hidden_act": _text,
        "tie_word_embeddings": _flag,
    }
)
# What may be left out: a shape does without, or its architecture has none.
_ALLOWED: Mapping[str, _Check] = MappingProxyType(
    {
        "head_dim": _count,
        "rope_theta": _theta,
        "rope_scaling": _nothing,
        "rope_parameters": _rope,
        "architectures": _names,
        "bos_token_id": _token_id,
        "eos_token_id": _token_ids,
        "pad_token_id": _token_id,
        "torch_dtype": _dtype,
        "dtype": _dtype,
        "initializer_range": _share,
        "attention_dropout": lambda value: value == 0 or _share(value),
        "use_cache": _flag,
        "transformers_version": _text,
    }
)
_QWEN: Mapping[str, _Check] = MappingProxyType(
    {
        "use_sliding_window": lambda value: value is False,
        "sliding_window": lambda value: value is None or _count(value),
        "max_window_layers": lambda value: type(value) is int and value >= 0,
        "layer_types": lambda value: _names(value) and set(value) == {"full_attention"},
    }
)
_FAMILIES: Mapping[str, Mapping[str, _Check]] = MappingProxyType(
    {
        "llama": {"attention_bias": _flag, "mlp_bias": _flag, "pretraining_tp": _count},
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "attention_bias": _flag},
    }
)


def plain_config(written: Mapping[str, Any]) -> Any | None:
    """What config.json says, with the attributes that a shape is read from; None if it takes more.

    written: its content.
    """
    kind = written.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        return None
    known = {**_NEEDED, **_ALLOWED, **_FAMILIES[kind]}
    if not _NEEDED.keys() <= written.keys() <= known.keys():
        return None
    if not all(known[name](value) for name, value in written.items()) or not _agrees(written):
        return None
    default = {"rope_type": "default", "rope_theta": written.get("rope_theta")}
    rope = written.get("rope_parameters", default)
    return SimpleNamespace(**{**written, "rope_parameters": rope})


def _agrees(written: Mapping[str, Any]) -> bool:
    """True if keys that hang together do."""
    layers = written["num_hidden_layers"]
    return (
        written["hidden_size"] % written["num_attention_heads"] == 0
        and ("rope_theta" in written) != ("rope_parameters" in written)  # one of them says it
        and len(written.get("layer_types", ())) in (0, layers)
        # A head has a width of its own there.
        and (written["model_type"] != "qwen3" or "head_dim" in written)
    )
