"""Shapes by name: models whose sizes are known without a file, and `random:` ones in line.

Knows no files, no weights and no torch. Sizes are those of the models' published configs.
A process reward model has the shape of the model that it was trained from; its own head is a few
rows, and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

from beamwright.errors import InputError
from beamwright.models.shape import (
    FAMILIES,
    BuiltSizes,
    LayerGroup,
    ModelShape,
    NotBuiltError,
    StatePart,
)

_UNSCALED = ("default", "dynamic")  # which changes behind max_position_embeddings alone
_ROPE_TYPES = (*_UNSCALED, "linear", "llama3", "yarn")
SUPPORTED = (
    f"supported: {', '.join(FAMILIES)} with dense layers, full or sliding attention, "
    f"rope types {', '.join(_ROPE_TYPES)}"
)
"""By the own decoder."""
_SIZES = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "context")


def frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """Inverse rotary frequencies of plain positions."""
    return tuple(theta ** -(2 * i / head_dim) for i in range(head_dim // 2))


def _shape(family: str, *values: int, theta: float = 1e4, **flags: Any) -> ModelShape:
    """A model of a family. values: as in `_SIZES`; theta: base of the rotary frequencies."""
    sizes: dict[str, Any] = dict(zip(_SIZES, values, strict=True))
    head_dim = flags.pop("head_dim", sizes["hidden"] // sizes["heads"])
    fields = {**FAMILIES[family].flags(SimpleNamespace()), **sizes, **flags}
    if "learned_positions" not in fields:
        fields["inv_freq"] = frequencies(theta, head_dim)
    return ModelShape(family, head_dim=head_dim, full_context=sizes["context"], **fields)


def _opt(hidden: int, layers: int, heads: int, vocab: int, context: int) -> ModelShape:
    return _shape("opt", hidden, layers, heads, heads, 4 * hidden, vocab, context)


_qwen2 = partial(_shape, "qwen2", theta=1e6)


def _qwen3(*sizes: int, tied: bool = False) -> ModelShape:
    return _shape("qwen3", *sizes, 151936, 40960, theta=1e6, head_dim=128, tied=tied)


def _qwen3_5(
    hidden: int, layers: int, heads: int, intermediate: int, value_heads: int
) -> ModelShape:
    """Three gated delta nets to each layer of attention, whose queries have a gate beside them."""
    vocab, context, head_dim, kv_heads, wide, kernel = 248320, 262144, 256, 4, 128, 4
    attended = tuple(range(3, layers, 4))
    recurrent = [at for at in range(layers) if at not in attended]
    values, queries = value_heads * wide, heads * head_dim
    mixed = 2 * 16 * wide + values  # queries and keys of 16 heads, and values
    counts = Counter({(intermediate, hidden): 2 * layers, (hidden, intermediate): layers})
    for count, *rows in (
        (len(recurrent), mixed, values),
        (len(attended), 2 * queries, kv_heads * head_dim, kv_heads * head_dim),
    ):
        for each in rows:
            counts[each, hidden] += count
    counts[hidden, values] += len(recurrent)
    counts[hidden, queries] += len(attended)
    others = len(recurrent) * (mixed * kernel + 2 * value_heads * (hidden + 1) + wide)
    others += len(attended) * 2 * head_dim + (2 * layers + 1) * hidden
    head = vocab * hidden
    total = sum(prod(size) * count for size, count in counts.items()) + others + 2 * head
    return ModelShape(
        "qwen3_5_text",
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate,
        vocab,
        context,
        full_context=context,
        groups=(LayerGroup(attended, kv_heads, head_dim),),
        states=tuple(
            part
            for at in recurrent
            for part in (
                StatePart(at, "conv", (mixed, kernel)),
                StatePart(at, "recurrent", (value_heads, wide, wide), wide=True),
            )
        ),
        built=BuiltSizes(total, total, head, tuple((*size, n) for size, n in counts.items())),
    )


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
    "qwen3.5-9b": _qwen3_5(4096, 32, 16, 12288, 32),
    "qwen3.5-27b": _qwen3_5(5120, 64, 24, 17408, 48),
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


def named_shape(text: str) -> ModelShape | None:
    """The shape of a model by its short name, or by the hub's `[hf:][ORG/]NAME`; None if unknown.

    Reads nothing: `Qwen/Qwen2.5-1.5B-Instruct` is known by its name to be a `qwen2.5-1.5b`.
    """
    key = text.removeprefix("hf:").partition("@")[0].rpartition("/")[2].lower()
    key = key.removeprefix("meta-")
    for suffix in _SUFFIXES:
        key = key.removesuffix(suffix)
    return NAMED_SHAPES.get(_HUB_NAMES.get(key, key))


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
    kv_heads = values.setdefault("kv_heads", values["heads"])
    if values["hidden"] % values["heads"] or values["heads"] % kv_heads:
        raise InputError("random shape: heads must divide hidden, and kv_heads must divide heads")
    if name == "opt":
        return _opt(*(values[key] for key in ("hidden", "layers", "heads", "vocab", "context")))
    flags = {"head_dim": values["head_dim"]} if "head_dim" in values else {}
    return _shape(name, *(values[key] for key in _SIZES), **flags)


def capped(shape: ModelShape, max_context: int | None) -> ModelShape:
    """The shape with a context of so many tokens at most."""
    if max_context is None:
        return shape
    return replace(shape, context=min(shape.context, max_context))


def rotary(config: Any, head_dim: int) -> dict[str, Any]:
    """Inverse frequencies and the cos/sin scale, computed by transformers' own rope table; those of
    layers with a window, where a config has them apart."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    of_kind, kinds = rope.get("sliding_attention"), getattr(config, "layer_types", None) or ()
    if of_kind is None:
        inv_freq, scale = _frequencies(config, rope, head_dim)
        return {"inv_freq": inv_freq, "rope_scale": scale}
    (far, scale), (near, same) = (
        _frequencies(config, dict(rope[kind]), head_dim, layer_type=kind)
        for kind in ("full_attention", "sliding_attention")
    )
    if same != 1.0:
        raise NotBuiltError("scaled positions in a window are not supported")
    slides = tuple(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"inv_freq": far, "rope_scale": scale, "near_freq": near, "near": slides}


def scales_positions(config: Mapping[str, Any]) -> bool:
    """Whether its rotary positions are scaled: `rotary` then needs a `transformers` config."""
    rope = config["rope_parameters"]
    kinds = rope if "full_attention" in rope else {"all": rope}
    return any(kind["rope_type"] not in _UNSCALED for kind in kinds.values())


def _frequencies(
    config: Any, rope: dict[str, Any], head_dim: int, **of_layers: str
) -> tuple[tuple[float, ...], float]:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise NotBuiltError(f"rope type {kind!r} is not supported; {SUPPORTED}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotBuiltError(f"partial rotary positions are not supported; {SUPPORTED}")
    if kind in _UNSCALED:
        return frequencies(float(rope.get("rope_theta", 10_000.0)), head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 (slow import)

    freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **of_layers)
    return tuple(freq.double().tolist()), float(scale)
