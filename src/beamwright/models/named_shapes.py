"""Shapes by name (`random:opt-6.7b`) and inline (`random:llama,layers=4,hidden=128,...`).

Sizes are those of the models' published configs. A process reward model has the shape of the model
that it was trained from; its own head is a few rows, and is left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from beamwright.errors import InputError
from beamwright.models.hf_config import FAMILIES
from beamwright.models.shape import ModelShape

_SIZES = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "context")
_OF_OPT: dict[str, Any] = {
    "norm_eps": 1e-5,
    "norm": "layer",
    "activation": "relu",
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
    "learned_positions": 2,
}


def _shape(family: str, *values: int, theta: float = 1e4, **flags: Any) -> ModelShape:
    """A model of a family. values: as in `_SIZES`; theta: base of the rotary frequencies."""
    sizes: dict[str, Any] = dict(zip(_SIZES, values, strict=True))
    head_dim = flags.pop("head_dim", sizes["hidden"] // sizes["heads"])
    if family == "opt":
        flags |= _OF_OPT
    else:
        inv_freq = tuple(theta ** -(2 * i / head_dim) for i in range(head_dim // 2))
        flags |= {"inv_freq": inv_freq, "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    context = sizes["context"]
    return ModelShape(family, **sizes, head_dim=head_dim, full_context=context, **flags)


def _opt(hidden: int, layers: int, heads: int, vocab: int, context: int) -> ModelShape:
    return _shape("opt", hidden, layers, heads, heads, 4 * hidden, vocab, context)


_qwen2 = partial(_shape, "qwen2", theta=1e6)


def _qwen3(*sizes: int, tied: bool = False) -> ModelShape:
    return _shape("qwen3", *sizes, 151936, 40960, theta=1e6, head_dim=128, tied=tied)


# hidden, layers, heads, kv_heads, intermediate, vocab, context
_QWEN_1_5B = (1536, 28, 12, 2, 8960, 151936)
_QWEN_7B = (3584, 28, 28, 4, 18944, 152064)
_LLAMA_8B = (4096, 32, 32, 8, 14336, 128256, 131072)

NAMED_SHAPES: dict[str, ModelShape] = {
    "opt-2.7b": _opt(2560, 32, 32, 50272, 2048),
    "opt-6.7b": _opt(4096, 32, 32, 50272, 2048),
    "llama-2-7b": _shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-3.1-8b": _shape("llama", *_LLAMA_8B, theta=5e5),
    "llama-3.2-1b": _shape("llama", 2048, 16, 32, 8, 8192, 128256, 131072, theta=5e5, tied=True),
    "llama-3.2-3b": _shape("llama", 3072, 28, 24, 8, 8192, 128256, 131072, theta=5e5, tied=True),
    "mistral-7b": _shape("mistral", 4096, 32, 32, 8, 14336, 32768, 32768, theta=1e6),
    "qwen1.5-4b": _shape("qwen2", 2560, 40, 20, 20, 6912, 151936, 32768, theta=5e6),
    "qwen1.5-7b": _shape("qwen2", 4096, 32, 32, 32, 11008, 151936, 32768, theta=1e6),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, 151936, 32768, tied=True),
    "qwen2.5-1.5b": _qwen2(*_QWEN_1_5B, 32768, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, 151936, 32768, tied=True),
    "qwen2.5-7b": _qwen2(*_QWEN_7B, 32768),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824, 152064, 32768),
    "qwen2.5-math-1.5b": _qwen2(*_QWEN_1_5B, 4096, tied=True),
    "qwen2.5-math-7b": _qwen2(*_QWEN_7B, 4096),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
    "skywork-prm-1.5b": _qwen2(*_QWEN_1_5B, 4096, tied=True),
    "skywork-prm-7b": _qwen2(*_QWEN_7B, 4096),
    "math-shepherd-7b": _shape("mistral", 4096, 32, 32, 8, 14336, 32000, 32768),
    "rlhflow-prm-8b": _shape("llama", *_LLAMA_8B, theta=5e5),
    "qwen2.5-math-prm-7b": _qwen2(*_QWEN_7B, 4096),
}

# How the hub calls them, where more than a suffix differs.
_HUB_NAMES = {
    "skywork-o1-open-prm-qwen-2.5-1.5b": "skywork-prm-1.5b",
    "skywork-o1-open-prm-qwen-2.5-7b": "skywork-prm-7b",
    "math-shepherd-mistral-7b-prm": "math-shepherd-7b",
    "llama3.1-8b-prm-deepseek-data": "rlhflow-prm-8b",
    "llama3.1-8b-prm-mistral-data": "rlhflow-prm-8b",
}
_SUFFIXES = ("-instruct", "-chat", "-hf")
# Whose they are there, by how a name begins; the others have other names there.
_OWNERS = {
    "qwen": "Qwen",
    "skywork-o1": "Skywork",
    "math-shepherd-mistral": "peiyi9979",
    "llama3.1-8b-prm": "RLHFlow",
    "llama-": "meta-llama",
    "opt-": "facebook",
}


def named_shape(text: str) -> ModelShape | None:
    """The shape of a model by its short name, or by the hub's `[hf:][ORG/]NAME`; None if unknown.

    Reads nothing: `Qwen/Qwen2.5-1.5B-Instruct` is known by its name to be a `qwen2.5-1.5b`.
    """
    key = text.removeprefix("hf:").partition("@")[0].rpartition("/")[2].lower()
    key = key.removeprefix("meta-")
    for suffix in _SUFFIXES:
        key = key.removesuffix(suffix)
    return NAMED_SHAPES.get(_HUB_NAMES.get(key, key))


def hub_name(text: str) -> str | None:
    """ORG/NAME on the hub, where a known model is named without ORG; None for anything else."""
    if "/" in text or ":" in text or named_shape(text) is None:
        return None
    owners = (owner for start, owner in _OWNERS.items() if text.lower().startswith(start))
    return next((f"{owner}/{text}" for owner in owners), None)


def shape_from_text(text: str) -> ModelShape:
    """A named shape, or `FAMILY,layers=,hidden=,heads=,kv_heads=,intermediate=,vocab=,context=`.

    Raises:
        InputError: for an unknown name or family, or keys that are unknown, missing or not
            positive whole numbers.
    """
    name, _, rest = text.partition(",")
    if not rest:
        if name.lower() not in NAMED_SHAPES:
            raise InputError(f"random:{name}: no such shape; known: {', '.join(NAMED_SHAPES)}")
        return NAMED_SHAPES[name.lower()]
    if name not in FAMILIES:
        raise InputError(f"random:{name},...: family must be one of {', '.join(FAMILIES)}")
    values: dict[str, int] = {}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        if key not in (*_SIZES, "head_dim"):
            raise InputError(f"random:{text}: unknown key {key!r}; known: {', '.join(_SIZES)}")
        if not value.isdigit() or int(value) < 1:
            raise InputError(f"random:{text}: {key} must be a positive whole number")
        values[key] = int(value)
    missing = [key for key in _SIZES if key not in values and key != "kv_heads"]
    if missing:
        raise InputError(f"random:{text}: missing {', '.join(missing)}")
    return _inline(name, values)


def _inline(name: str, values: dict[str, int]) -> ModelShape:
    kv_heads = values.get("kv_heads", values["heads"])
    if values["hidden"] % values["heads"] or values["heads"] % kv_heads:
        raise InputError("random shape: heads must divide hidden, and kv_heads must divide heads")
    if name == "opt":
        return _opt(*(values[key] for key in ("hidden", "layers", "heads", "vocab", "context")))
    sizes = {**values, "kv_heads": kv_heads}
    flags = {"head_dim": values["head_dim"]} if "head_dim" in values else {}
    return _shape(name, *(sizes[key] for key in _SIZES), **flags)
