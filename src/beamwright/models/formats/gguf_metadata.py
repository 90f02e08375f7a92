"""Translates a GGUF file's metadata and tensor names to those of Hugging Face.

`gguf_metadata.toml` has the corresponding keys and names of both formats. This module needs no
torch.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_toml_beside
from beamwright.models.formats import key_tables
from beamwright.models.formats.header import KEPT, GgufHeader, TensorInfo, read_header

GGUF = ".gguf"
_WORDS = read_toml_beside(__file__)
# Number of layers of the 27B models, whose attention scores have another scale. llama.cpp
# recognises these models by the number too.
_UNUSUAL_SCALE = {"gemma2": 46, "gemma3": 62}
_PERIOD = {"gemma2": 2, "gemma3": 6}  # every 2nd or 6th layer has no sliding window
_IN_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_SHARD = re.compile(r"(.*-)\d{5}(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
_TILE_ROWS = 16
# GGUF types whose 6-bit scales are stored in 8 bits here, which adds 4 bytes per 256 weights.
_FACTORS_OF_SIX = (12, 13)
_LONGEST = 1 << 20  # maximum number of positions of a model
_LARGEST = 2**31 - 1
_BETAS = ("beta_fast", "beta_slow")
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shards(file: Path) -> list[Path]:
    """Return all shards of the model that `file` belongs to; a model in one file has one.

    Raises:
        InputError: if a shard is missing.
    """
    match = _SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    before, of, count, after = match.groups()
    files = [file.with_name(f"{before}{n:05}{of}{count}{after}") for n in range(1, int(count) + 1)]
    for each in files:
        if not each.is_file():
            raise InputError(f"model {file}: shard {each.name} is missing")
    return files


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the headers of all shards of a model, and merge them into one.

    Raises:
        InputError, UnsupportedModelError: as `shards` and `read_header`.
    """
    headers = [read_header(each) for each in shards(file)]
    tensors = {name: place for header in headers for name, place in header.tensors.items()}
    return GgufHeader(headers[0].metadata, tensors)


class TensorNameMap:
    """Translator of one architecture's tensor names between GGUF and Hugging Face.

    unit_offset: True if GGUF stores the weights of norms with 1 added.
    """

    def __init__(self, kind: object) -> None:
        self.unit_offset = str(kind).startswith("gemma")
        around = _WORDS["around"] if self.unit_offset and kind != "gemma" else {}
        self._layers: dict[str, str] = _WORDS["layer_names"] | around
        self._outside: dict[str, str] = _WORDS["names"]
        self._ours = {ours: called for called, ours in (self._outside | self._layers).items()}

    def gguf_name(self, name: str) -> tuple[str, int | None]:
        """Return the GGUF name of a Hugging Face tensor, and its expert's number or None.

        GGUF stores all experts of a layer in one tensor.
        """
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            stem, _, part = name.rpartition(".")
            return f"{self._ours.get(stem)}.{part}", None
        layer, stem, part = match.groups()
        if (expert := _EXPERT.fullmatch(stem)) is not None:
            return f"blk.{layer}.ffn_{expert[2]}_exps.{part}", int(expert[1])
        return f"blk.{layer}.{self._ours.get(stem)}.{part}", None

    def hugging_face_names(self, name: str, count: int) -> list[str]:
        """Return the Hugging Face names of the GGUF tensor `name`; [] if it is unknown.

        A tensor with all experts of a layer has `count` names, one per expert; others have one.
        """
        stem, _, part = name.rpartition(".")
        if stem in self._outside:
            return [f"{self._outside[stem]}.{part}"]
        _, layer, called = [*stem.split(".", 2), "", ""][:3]
        at = f"model.layers.{layer}"
        if (match := _EXPERTS.fullmatch(called)) is not None:
            return [f"{at}.mlp.experts.{one}.{match[1]}_proj.{part}" for one in range(count)]
        return [f"{at}.{self._layers[called]}.{part}"] if called in self._layers else []


def permuted_heads(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the number of heads of tensors with reordered rows, by a part of the tensor's name.

    In GGUF files of Llama the two rows of a rotary pair are adjacent. Hugging Face stores the first
    rows of all pairs of a head, then the second rows.
    """
    if metadata.get("general.architecture") != "llama":
        return {}
    heads = _count(metadata, "llama.attention.head_count")
    return {"attn_q": heads, "attn_k": _count(metadata, "llama.attention.head_count_kv", heads)}


def raise_if_unsupported(*faults: tuple[bool, str]) -> None:
    """Check that no fault applies to a model.

    faults: pairs (whether the fault applies, error message).

    Raises:
        UnsupportedModelError: with the message of the first fault that applies.
    """
    for is_there, line in faults:
        if is_there:
            raise UnsupportedModelError(line)


def _count(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the positive whole number at `key`, or `default` if the key is missing.

    Raises:
        UnsupportedModelError: for another value, or for a list with different numbers.
    """
    value = given.get(key, default)
    first, *others = {*value} if isinstance(value, list) and value else {value}
    wrong = bool(others) or type(first) is not int or not 0 < first <= _LARGEST
    raise_if_unsupported(
        (wrong, f"the GGUF header's {key} must be one count for all layers, not {value!r:.60}")
    )
    return int(first)


def read_config(file: Path) -> dict[str, Any]:
    """Build the contents of a config.json from a GGUF file's header.

    Raises:
        InputError: for a damaged file.
        UnsupportedModelError: for an architecture that is not supported, or for a key that asks for
            something that is not implemented.
    """
    header, models, count = read_gguf_header(file), _WORDS["models"], len(shards(file))
    metadata, tensors = header.metadata, header.tensors
    kind, what = metadata.get("general.architecture", ""), metadata.get("general.type", "model")
    parts, held = metadata.get("split.count") or 1, "other weights" if tensors else "a vocabulary"
    known_models = ", ".join(models)
    raise_if_unsupported(
        (what != "model", f"the GGUF file holds no model: its general.type is {what!r:.40}"),
        (
            kind not in models,
            f"GGUF architecture {kind!r:.80} is not supported; use {known_models}",
        ),
        (parts != count, f"one of {parts} shards must be named NAME-00001-of-{parts:0>5}.gguf"),
        ("token_embd.weight" not in tensors, f"the GGUF file holds only {held}, not a whole model"),
    )
    given = {k.removeprefix(f"{kind}."): v for k, v in metadata.items() if k.startswith(f"{kind}.")}
    key_tables.GGUF[kind].check([f"{kind}.{key}" for key, v in given.items() if v], f"model {file}")
    needed = _WORDS["counts"] | (_WORDS["expert_counts"] if kind.endswith("moe") else {})
    config: dict[str, Any] = {ours: _count(given, key) for key, ours in needed.items()}
    config |= {ours: given[key] for key, ours in _WORDS["options"].items() if key in given}
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    usual = config["hidden_size"] // heads
    width = _count(given, "attention.key_length", usual)
    widths = [
        _count(given, key, width) for key in ("attention.value_length", "rope.dimension_count")
    ]
    causal, last = given.get("attention.causal", True), f"blk.{layers - 1}.attn_norm.weight"
    raise_if_unsupported(
        (widths != [width] * 2, f"keys of width {width} with values, rotary positions of {widths}"),
        (last not in tensors, f"the GGUF header declares {layers:,} layers, but {last} is missing"),
        (causal is not True, "non-causal attention (attention.causal) is not supported"),
    )
    # The context is bounded, because the decoder computes rotary angles for every position.
    config["max_position_embeddings"] = min(config["max_position_embeddings"], _LONGEST)
    window = given.get("attention.sliding_window", 4096 if kind == "gemma2" else None)
    rope = _rope(given, 1e6 if kind == "gemma3" else 1e4, config["max_position_embeddings"])
    if (factors := tensors.get("rope_freqs.weight")) is not None:
        rope = _llama3_rope(factors, rope, kind)
    if kind in _PERIOD:
        config["query_pre_attn_scalar"] = usual if layers == _UNUSUAL_SCALE[kind] else width
        period = given.get("attention.sliding_window_pattern", _PERIOD[kind])
        slides = (
            period
            if isinstance(period, list)
            else [not period or (number + 1) % period for number in range(layers)]
        )
        names = ("full_attention", "sliding_attention")
        config["layer_types"] = [names[bool(window and each)] for each in slides]
    if kind == "gemma3":
        near = {"rope_type": "default", "rope_theta": given.get("rope.freq_base_swa", 1e4)}
        rope = {"full_attention": rope, "sliding_attention": near}
    # A file of architecture llama with biases of only queries, keys and values has Qwen2's layers.
    biases = [f"blk.0.attn_{part}.bias" in tensors for part in ("q", "output")]
    model_type = "qwen2" if kind == "llama" and biases == [True, False] else models[kind]
    in_blocks = any(place.kind in KEPT for place in tensors.values())
    model_type = "mistral" if window and kind == "llama" else model_type
    config = {"rms_norm_eps": 1e-6, **_WORDS["defaults"].get(model_type, {}), **config}
    return config | {
        "model_type": model_type,
        "num_key_value_heads": _count(given, "attention.head_count_kv", heads),
        "head_dim": width,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(biases),
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "norm_topk_prob": kind == "qwen3moe",
        "sliding_window": window,
        "rope_parameters": rope,
        "dtype": "bfloat16" if in_blocks else "float32",
    }


def gguf_remarks(file: Path) -> tuple[str, ...]:
    """Return warnings, one line each, about unknown metadata keys of the file itself.

    `read_config` checks the keys of the model, which begin with the architecture's name.
    """
    metadata = read_header(shards(file)[0]).metadata
    others = [k for k in metadata if not k.startswith(f"{metadata.get('general.architecture')}.")]
    return key_tables.GGUF_FILE.check(others, f"model {file}")


def _rope(given: Mapping[str, Any], theta: float, context: int) -> dict[str, Any]:
    """Return the rotary settings of a GGUF header as `rope_parameters` of `transformers`.

    theta, context: values to use if the header has none.
    """
    at, rope = "rope.scaling.", {"rope_theta": given.get("rope.freq_base", theta)}
    kind, scale = given.get(f"{at}type", "linear"), given.get(f"{at}attn_factor", 1.0)
    factor = given.get(f"{at}factor", given.get("rope.scale_linear")) or 1.0
    odd = kind not in ("none", "linear", "yarn") or (scale != 1.0 and kind != "yarn")
    raise_if_unsupported(
        (odd, f"GGUF rope scaling {kind!r:.40} with attn_factor {scale} is not supported")
    )
    if kind == "none" or factor == scale == 1.0:
        return rope | {"rope_type": "default"}
    if kind == "yarn":
        scale *= given.get(f"{at}yarn_attn_factor", 1 + 0.1 * math.log(max(factor, 1.0)))
        original = given.get(f"{at}original_context_length", context)
        rope |= {"attention_factor": scale, "original_max_position_embeddings": original}
        rope |= {key: given[f"{at}yarn_{key}"] for key in _BETAS if f"{at}yarn_{key}" in given}
    return rope | {"rope_type": kind, "factor": factor}


def _llama3_rope(place: TensorInfo, rope: dict[str, Any], kind: str) -> dict[str, Any]:
    """Add Llama 3's rotary scaling to `rope`. A GGUF file has only the resulting factors.

    place: the tensor with one factor per frequency. The largest one is the scaling's "factor", from
        which all others follow.

    Raises:
        UnsupportedModelError: if the factors in the file are not those of Llama 3's scaling.
    """
    with open(place.file, "rb") as stream:
        stream.seek(place.start)
        factors = struct.unpack(f"<{place.size // 4}f", stream.read(place.size))
    rope |= {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    expected = zip(factors, _llama3_factors(rope, len(factors)), strict=True)
    differs = any(not math.isclose(*pair, rel_tol=1e-3) for pair in expected)
    odd = bool(place.kind) or differs or kind != "llama"
    raise_if_unsupported((odd, "GGUF rope factors other than Llama 3's are not supported"))
    return rope


def _llama3_factors(rope: dict[str, Any], count: int) -> Iterator[float]:
    """Yield the factor by which Llama 3's scaling divides each of `count` frequencies."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for number in range(count):
        wave = 2 * math.pi * float(rope["rope_theta"]) ** (number / count)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - smooth) / rope["factor"] + smooth)


def weight_sizes(file: Path) -> dict[str, Any]:
    """Return the sizes of a model's weights, as the fields `packed` and `blocks` of `ModelShape`.

    packed: for the projections of all layers, the bytes of those that stay quantised, and the
        number of values of the others.
    blocks: the bytes of all tensors in blocks, as `models.native` stores them, the number of
        values of the other tensors, and the bytes of the LM head's blocks. An embedding that is not
        also the LM head does not count if the head is in blocks, because its rows are then read
        from the file on demand.
    """
    tensors = dict(read_gguf_header(file).tensors)
    packed = values = 0
    for name, place in tensors.items():
        if not name.startswith("blk.") or len(place.shape) < 2:
            continue
        bits, group = KEPT.get(place.kind, (0, 1))
        count = math.prod(place.shape)
        packed += count // group * (group * bits // 8 + bits) if bits else 0
        values += 0 if bits else count
    head = tensors.get("output.weight", tensors.get("token_embd.weight"))
    if head is not None and head.kind in KEPT and "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    blocks = plain = of_head = 0
    for each in tensors.values():
        if each.kind not in KEPT:
            plain += math.prod(each.shape)
            continue
        *matrices, rows, columns = each.shape
        row = each.size // (math.prod(matrices) * rows)
        row += columns // 256 * 4 * (each.kind in _FACTORS_OF_SIX)
        tiles = math.prod(matrices) * -(-rows // _TILE_ROWS) * _TILE_ROWS * row
        blocks += tiles
        of_head += tiles if each is head else 0
    return {"packed": (packed, values), "blocks": (blocks, plain, of_head)}
