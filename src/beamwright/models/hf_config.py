"""Reads a model's config.json, or a GGUF file's metadata, into a `ModelShape`.

This is the only reader of Hugging Face configs. It refuses a config for which the decoder would
give wrong results; the message names what is supported. Code in a model's folder (`auto_map`) is
never run. `transformers` parses configs, except those of the bundled models and of most GGUF files.
Those need no defaults, and importing `transformers` takes a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from beamwright.errors import InputError, UnsupportedModelError, error_line
from beamwright.io import read_json_object, read_toml_beside
from beamwright.models.formats import gguf_metadata
from beamwright.models.formats.files import (
    find_method,
    packed_sizes,
    read_config_file,
    read_quantisation,
)
from beamwright.models.formats.header import is_gguf
from beamwright.models.formats.key_tables import CONFIGS, QUANTISATION, nonempty_keys
from beamwright.models.hub import BUNDLED, resolve_folder
from beamwright.models.named import (
    NAMED_SHAPES,
    limit_context,
    named_shape,
    rotary_frequencies,
    shape_from_text,
)
from beamwright.models.shape import FAMILIES, LayerGroup, ModelShape, NoDecoderError
from beamwright.sections import DecoderChoice, ModelSettings

# "dynamic" changes positions only beyond max_position_embeddings, which no path exceeds.
_UNSCALED = ("default", "dynamic")
_ROPE_TYPES = (*_UNSCALED, "linear", "llama3", "yarn")
# The part of messages that names what Beamwright's own decoder supports.
SUPPORTED = (
    f"supported: {', '.join(FAMILIES)} with dense layers, full or sliding attention, "
    f"rope types {', '.join(_ROPE_TYPES)}"
)
_KEYS = read_toml_beside(__file__)
_FIELD = re.compile(r"[Ff]ield '(\w+)'|(RoPE)")
_LARGEST = 2**31 - 1
_WIDEST_HEAD = 2**14
_ELSEWHERE = "serve this model with another engine and pass --model openai:URL#NAME"


def find_shape(
    settings: ModelSettings, role: str = "generator", written: str | None = None, known: str = ""
) -> ModelShape:
    """Return the shape of the model that `--model` names, without reading weights.

    For a model whose name is in `NAMED_SHAPES`, no file is read or downloaded.
    role, written, known: as in `resolve_folder`.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: if loading the model would fail.
    """
    spec = settings.model
    shape = None if Path(spec).is_dir() else named_shape(spec)
    if shape is None and spec.startswith("random:"):
        shape = shape_from_text(spec.removeprefix("random:"))
    if shape is not None:
        return limit_context(shape, settings.context)
    shapes = "" if "/" in (written or spec) else f"shapes: {', '.join(NAMED_SHAPES)}"
    hint = "; ".join(filter(None, (known, shapes)))
    folder = resolve_folder(spec, role, written, hint, weights=False)
    return read_shape(folder, settings.context, role, settings.decoder)


def read_eos_ids(folder: Path) -> frozenset[int]:
    """Return the token ids that end a reply, from generation_config.json, or from config.json.

    Raises:
        InputError: if one of the files is not a JSON object.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = read_json_object(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return frozenset(index for index in ids if type(index) is int and index >= 0)
    return frozenset()


def read_shape(
    folder: Path, max_context: int | None, role: str = "generator", decoder: DecoderChoice = "auto"
) -> ModelShape:
    """Read the shape of a model from a folder's config.json, or from a GGUF file.

    max_context: maximum number of tokens of a path; None: the checkpoint's limit. A sliding window
        that is at least as long has no effect, so the shape leaves it out.
    decoder: the value of `--decoder`. "auto" uses a `transformers` model where Beamwright's own
        decoder does not support the config.

    Raises:
        UnsupportedModelError: for an architecture that neither decoder supports, an option that is
            not implemented, or invalid values.
    """
    try:
        written = gguf_metadata.read_config(folder) if is_gguf(folder) else read_config_file(folder)
        _check_counts(written)
        _check_weights(written)
        shape = None
        try:
            if decoder != "transformers":
                shape = _own_shape(folder, written, max_context)
        except NoDecoderError:
            if decoder == "own":
                raise
        shape = shape or _built_shape(folder, written, max_context)
        if shape.states and role == "verifier":
            raise UnsupportedModelError(
                "recurrent layers are supported in generators, not in verifiers"
            )
        sizes = packed_sizes(written, shape.matrices)
        return replace(shape, **(gguf_metadata.weight_sizes(folder) if is_gguf(folder) else sizes))
    except NoDecoderError as error:
        way = f"; {_ELSEWHERE}" if role == "generator" else ""
        way += "; --decoder auto runs models that transformers builds" if decoder == "own" else ""
        raise UnsupportedModelError(f"model {folder}: {error}{way}") from error
    except InputError as error:
        line = str(error)
        if not isinstance(error, UnsupportedModelError) and not is_gguf(folder):
            line = f"config cannot be read: {line}; {SUPPORTED}"
        elif not line.startswith("model "):
            line = f"model {folder}: {line}"
        raise UnsupportedModelError(line) from error
    except Exception as error:  # for example a value of a type that no check above expects
        raise UnsupportedModelError(
            f"model {folder}: config.json describes no valid model ({error_line(error)})"
        ) from error


def config_of(folder: Path) -> Any:
    """Return a model's config as an object of `transformers`.

    Raises:
        UnsupportedModelError: if `transformers` cannot read it.
    """
    from transformers import AutoConfig  # noqa: PLC0415 (slow import)

    try:
        if is_gguf(folder):
            return AutoConfig.for_model(**gguf_metadata.read_config(folder))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any type, caused by the file's contents
        key = _FIELD.search(str(error))
        what = f"config.json: {key[1]} is invalid" if key else "config.json is invalid"
        raise UnsupportedModelError(f"{what} ({error_line(error)}); {SUPPORTED}") from error


def _own_shape(folder: Path, written: Mapping[str, Any], max_context: int | None) -> ModelShape:
    _check_known(written, FAMILIES)
    whole = folder.parent == BUNDLED or (is_gguf(folder) and not _scales_positions(written))
    return _shape_of(SimpleNamespace(**written) if whole else config_of(folder), max_context)


def _built_shape(folder: Path, written: Mapping[str, Any], max_context: int | None) -> ModelShape:
    """Return the shape of a model whose modules `transformers` builds (see `survey`)."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 (slow import)

    _check_known(written, CONFIG_MAPPING)
    from beamwright.models.survey import shape_of, survey_model  # noqa: PLC0415 (of torch)

    return shape_of(survey_model(config_of(folder)), max_context)


def _shape_of(given: Any, max_context: int | None) -> ModelShape:
    # `transformers` may return another model_type than config.json, as ministral for mistral.
    _check_known({"model_type": given.model_type}, FAMILIES)
    # A key that the modules of `transformers` do not read, such as a window in a Llama's config,
    # has no effect there, so it is left out.
    used = CONFIGS[given.model_type].used
    # torch_dtype is an older alias of `dtype`. Reading it causes a warning.
    keys = (key for key in used if key != "torch_dtype" and hasattr(given, key))
    config = SimpleNamespace(**{key: getattr(given, key) for key in keys})
    family, heads = FAMILIES[config.model_type], config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not 1 <= head_dim <= _WIDEST_HEAD:  # bounds the number of rotary frequencies
        raise UnsupportedModelError(
            f"config.json: head_dim must be from 1 to {_WIDEST_HEAD:,}, not {head_dim:,}"
        )
    context = config.max_position_embeddings
    if max_context is not None:
        context = min(context, max_context)
    if family.unsupported is not None and (odd := family.unsupported(config)) is not None:
        raise NoDecoderError(f"{config.model_type} with {odd} is not supported; {SUPPORTED}")
    fields = {
        "intermediate": getattr(config, "intermediate_size", None),
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "tied": bool(config.tie_word_embeddings),
        **family.shape_fields(config),
    }
    activations = _KEYS["activations"]
    if fields["activation"] not in activations:
        raise NoDecoderError(f"activation {fields['activation']!r} is not supported; {SUPPORTED}")
    fields["activation"] = activations[fields["activation"]]
    if "learned_positions" not in fields:
        fields |= _rotary(given, head_dim)
    if fields.get("unit_offset"):
        fields["embed_scale"] = config.hidden_size**0.5
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shape = ModelShape(
        architecture=config.model_type,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        context=context,
        full_context=config.max_position_embeddings,
        stored_bfloat16=str(getattr(config, "dtype", None)).endswith("bfloat16"),
        groups=_groups(config, family.window(config), context, (kv_heads, head_dim)),
        **fields,
    )
    _check_numbers(shape)
    return shape


def _groups(
    config: Any, window: int | None, context: int, heads: tuple[int, int]
) -> tuple[LayerGroup, ...]:
    """Group the layers into those with full attention and those with a sliding window.

    Return () if all layers attend to all tokens, because no window is shorter than the context.
    heads: number of KV heads, and head_dim.
    """
    if window is None or window >= context:
        return ()
    if type(window) is not int or window < 1:
        raise UnsupportedModelError(f"config.json: sliding_window must be positive, not {window!r}")
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sliding = [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    if len(sliding) + len(full) != config.num_hidden_layers:
        raise NoDecoderError(f"layer types {sorted(set(kinds))} are not supported; {SUPPORTED}")
    if not sliding:
        return ()
    groups = [LayerGroup(tuple(full), *heads)] if full else []
    return (*groups, LayerGroup(tuple(sliding), *heads, window))


def _check_known(values: Mapping[str, Any], known: Collection[str]) -> None:
    kind = values.get("model_type")
    if str(kind) not in known:
        code = ", and the folder's own code (auto_map) is never run"
        raise NoDecoderError(
            f"architecture {kind!r:.80} is not supported{code if values.get('auto_map') else ''}; "
            f"{SUPPORTED}"
        )


def _check_weights(values: Mapping[str, Any]) -> None:
    if (quantised := read_quantisation(values)) is not None:
        try:
            find_method(quantised)
            QUANTISATION.check(nonempty_keys(quantised), "config.json")
        except UnsupportedModelError as error:
            raise NoDecoderError(
                f"{error}; or use the original checkpoint with --weights int4 (a verifier's with "
                f"--verifier-weights int4); {SUPPORTED}"
            ) from error


def _check_counts(values: Mapping[str, Any]) -> None:
    """Check that the counts and widths in a config are whole numbers in a valid range.

    Raises:
        UnsupportedModelError: for the first value that is not such a number.
    """
    for name in _KEYS["counts"]:
        value = values.get(name)
        # Some families have a list with one value per layer.
        every = value if isinstance(value, list) else [value]
        if value is not None and not all(type(v) is int and 1 <= v <= _LARGEST for v in every):
            raise UnsupportedModelError(
                f"config.json: {name} must be a whole number from 1 to {_LARGEST:,}, "
                f"not {value!r:.80}"
            )
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )


def _check_numbers(shape: ModelShape) -> None:
    """Check the numbers that are computed from a config.

    Raises:
        UnsupportedModelError: for an odd head_dim, or for numbers that are not finite.
    """
    if shape.inv_freq and len(shape.inv_freq) * 2 != shape.head_dim:
        raise UnsupportedModelError(f"config.json: head_dim must be even, not {shape.head_dim}")
    numbers = {
        "rope": (*shape.inv_freq, *shape.local_freq, shape.rope_scale),
        "rms_norm_eps": (shape.norm_eps,),
    }
    for name, values in numbers.items():
        if not all(isinstance(v, float | int) and math.isfinite(v) and v >= 0 for v in values):
            raise UnsupportedModelError(f"config.json: {name} gives negative or infinite numbers")


# --- rotary positions ------------------------------------------------------------------------


def _rotary(config: Any, head_dim: int) -> dict[str, Any]:
    """Return the fields of `ModelShape` for rotary positions: inverse frequencies and scale.

    If sliding layers have frequencies of their own, as in Gemma 3, these layers and their
    frequencies are returned too.

    Raises:
        NoDecoderError: for positions that are not supported.
    """
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
        raise NoDecoderError("scaled positions in layers with a sliding window are not supported")
    slides = tuple(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"inv_freq": far, "rope_scale": scale, "local_freq": near, "local_layers": slides}


def _scales_positions(config: Mapping[str, Any]) -> bool:
    """Return whether positions are scaled, for which `_rotary` needs a `transformers` config."""
    rope = config["rope_parameters"]
    kinds = rope if "full_attention" in rope else {"all": rope}
    return any(kind["rope_type"] not in _UNSCALED for kind in kinds.values())


def _frequencies(
    config: Any, rope: dict[str, Any], head_dim: int, **of_layers: str
) -> tuple[tuple[float, ...], float]:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise NoDecoderError(f"rope type {kind!r} is not supported; {SUPPORTED}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NoDecoderError(f"partial rotary positions are not supported; {SUPPORTED}")
    if kind in _UNSCALED:
        return rotary_frequencies(float(rope.get("rope_theta", 10_000.0)), head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 (slow import)

    freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **of_layers)
    return tuple(freq.double().tolist()), float(scale)
