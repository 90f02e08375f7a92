"""Which checkpoint folder an option means, and its config.json as a ModelShape.

The one reader of Hugging Face configs. Raises UnsupportedModelError, with the list of what is
supported, for anything that would make the decoder compute something else than the checkpoint
means. A folder holds data: code that it brings along (`auto_map`) is never run and never asked
about. Knows no weights, needs no torch. `transformers` reads configs, but those of the bundled
pair: importing it takes as long as solving a problem with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from beamwright.errors import InputError, UnavailableError, UnsupportedModelError, line_of
from beamwright.io import read_object
from beamwright.models.formats.described import (
    GGUF,
    check_method,
    packed_sizes,
    quantisation,
    read_config,
    shards,
)
from beamwright.models.named import NAMED_SHAPES, capped, frequencies, named_shape, shape_from_text
from beamwright.models.shape import FAMILIES, LayerGroup, ModelShape, NotBuiltError
from beamwright.sections import ELSEWHERE, DecoderChoice, ModelSettings

BUNDLED = Path(__file__).parent.parent / "bundled"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
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
_SUPPORTED = (
    f"supported: {', '.join(FAMILIES)} with dense layers, full or sliding attention, "
    f"rope types {', '.join(_ROPE_TYPES)}"
)
_ELSEWHERE = (
    "--model vllm:PATH or --model openai:URL#NAME (a server that runs it) takes it today, with "
    "tree and verifier here"
)


# --- folders ---------------------------------------------------------------------------------


def resolve_folder(
    spec: str, role: str, written: str | None = None, known: str = "", *, weights: bool = True
) -> Path:
    """The checkpoint folder that `--model` or `--verifier` means.

    role: "generator" or "verifier", the bundled folder that `bundled` stands for;
    `bundled:strong` is the verifier's in either, whose backbone is a generator, too;
    `bundled:thinking` is a generator that thinks.
    written: the option's value where it says more than `spec`. known: what could be meant where
    there is no such folder. weights: of the hub's, download the weights, too.

    Raises:
        InputError: if there is no such folder; UnavailableError: if the hub cannot be reached.
    """
    option = f"{'--model' if role == 'generator' else '--verifier'} {written or spec}"
    if spec.startswith(ELSEWHERE):
        raise InputError(f"{option}: this needs the model itself, here")
    own = {"bundled": role, "bundled:strong": "verifier", "bundled:thinking": "thinking"}
    if spec in own:
        return BUNDLED / own[spec]
    if spec.startswith("hf:"):
        return _download(spec.removeprefix("hf:"), weights=weights)
    folder = Path(spec)
    if folder.suffix == GGUF and folder.is_file():
        return folder
    if not folder.is_dir():
        raise InputError(f"{option}: {_instead(spec, role, known)}")
    if (file := _gguf_in(folder)) is not None:
        return file
    if not (folder / "config.json").is_file():
        raise InputError(f"{spec}: no config.json in this folder")
    for file in folder.iterdir():
        # A pipe among a model's files would be waited for, a device be read for ever; so would
        # some files that the system makes up, which are regular ones by name.
        made_up = file.is_symlink() and file.resolve().parts[1:2] in (("proc",), ("sys",))
        if made_up or (file.exists() and not file.is_file() and not file.is_dir()):
            raise InputError(f"{file}: not a regular file")
    return folder


def _gguf_in(folder: Path, tag: str = "") -> Path | None:
    """A folder's GGUF file, the first of a model's shards, where it has no other weights.

    tag: part of its name, as the hub's users write it.

    Raises:
        InputError: if there are several models.
    """
    found = sorted(folder.rglob(f"*{GGUF}") if tag else folder.glob(f"*{GGUF}"))
    found = [file for file in found if tag.lower() in file.name.lower()]
    if not found or (not tag and any(folder.glob("*.safetensors"))):
        return None
    models = [file for file in found if "mmproj" not in file.name and file in shards(file)[:1]]
    if len(models) != 1:
        names = ", ".join(file.name for file in models)[:_LONGEST_LINE]
        raise InputError(f"{folder}: which of its GGUF files? {names}")
    return models[0]


def _instead(spec: str, role: str, known: str) -> str:
    """What is wrong with a place that is no folder."""
    folder = Path(spec)
    if folder.is_file():
        return "a file; the checkpoint's folder is expected"
    meant = None
    if _HUB_NAME.fullmatch(spec) and not folder.parent.is_dir():
        meant = f"hf:{spec}"
    elif role == "generator" and spec.startswith(("http://", "https://")):
        place = spec.rstrip("/")
        meant = f"openai:{place}{'' if '/' in place.partition('//')[2] else '/v1'}#NAME"
    elif role == "generator" and spec.startswith("ollama:"):
        meant = f"openai:http://127.0.0.1:11434/v1#{spec.removeprefix('ollama:')}"
    hint = known if meant is None else f"did you mean {meant}?"
    return f"no such folder; {hint}" if hint else "no such folder"


def tokenizer_folder(spec: str, written: str, *, weights: bool = False) -> Path:
    """The folder with the tokenizer that a name means; weights: and with the model's weights.

    ORG/NAME is a model of the hub where there is no such folder, as servers name theirs.

    Raises:
        InputError, UnavailableError: as `resolve_folder`.
    """
    hub = spec.removeprefix("hf:")
    if spec.startswith("hf:") or (_HUB_NAME.fullmatch(spec) and not Path(spec).is_dir()):
        return _download(hub, weights=weights)
    return resolve_folder(spec, "generator", written)


def find_shape(
    settings: ModelSettings, role: str = "generator", written: str | None = None, known: str = ""
) -> ModelShape:
    """The shape that `--model` means; the name of a known model will do. Reads no weights.

    role, written, known: as in `resolve_folder`.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model would.
    """
    spec = settings.model
    shape = None if Path(spec).is_dir() else named_shape(spec)
    if shape is None and spec.startswith("random:"):
        shape = shape_from_text(spec.removeprefix("random:"))
    if shape is not None:
        return capped(shape, settings.context)
    shapes = "" if "/" in (written or spec) else f"shapes: {', '.join(NAMED_SHAPES)}"
    hint = "; ".join(filter(None, (known, shapes)))
    folder = resolve_folder(spec, role, written, hint, weights=False)
    return read_shape(folder, settings.context, role, settings.decoder)


def _download(name: str, *, weights: bool = True) -> Path:
    """The hub's ORG/NAME[:GGUF][@REVISION], a branch, tag or commit.

    GGUF: part of a file's name, such as Q4_K_M: it alone is downloaded, whatever `weights` says.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow import)

    name, _, revision = name.partition("@")
    name, _, tag = name.partition(":")
    patterns = ["*.json", "*.model", "*.jinja", "*.txt", "verifier.yaml", "judge.yaml"]
    patterns += ["*.safetensors", "pytorch_model*.bin"] if weights else []
    if tag:
        patterns = [f"*{each}*{GGUF}" for each in (tag, tag.lower(), tag.upper())]
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds, network and not-found alike
        raise UnavailableError(
            f"hf:{name}: cannot be downloaded ({line_of(error)}); "
            "without a network, pass a local folder"
        ) from error
    file = _gguf_in(folder, tag) if tag else None
    if tag and file is None:
        raise InputError(f"hf:{name}: no GGUF file of that name has {tag!r:.40} in it")
    return file or folder


# --- files -----------------------------------------------------------------------------------


def read_eos_ids(folder: Path) -> frozenset[int]:
    """The token ids that end a reply, as generation_config.json or else config.json has them.

    Raises:
        InputError: if one of the files is not a JSON object.
    """
    if folder.suffix == GGUF:
        return frozenset(read_config(folder)["eos_token_id"])
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = read_object(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return frozenset(index for index in ids if type(index) is int and index >= 0)
    return frozenset()


# --- from a config to a shape ----------------------------------------------------------------


def read_shape(
    folder: Path, max_context: int | None, role: str = "generator", decoder: DecoderChoice = "auto"
) -> ModelShape:
    """The shape in a folder's config.json.

    max_context: the most tokens that will be used; a sliding window that is at least as long
    does not matter. decoder: as `--decoder`; auto: of `transformers` where the own one cannot.

    Raises:
        UnsupportedModelError: for an architecture that neither has, or an option that is not
        implemented, or values that make no model.
    """
    try:
        is_gguf = folder.suffix == GGUF
        written = read_config(folder) if is_gguf else read_object(folder / "config.json")
        _check_counts(written)
        _check_weights(written)
        shape = None
        try:
            if decoder != "transformers":
                shape = _own_shape(folder, written, max_context)
        except NotBuiltError:
            if decoder == "own":
                raise
        shape = shape or _built_shape(folder, written, max_context)
        if shape.states and role == "verifier":
            raise UnsupportedModelError("recurrent layers run in generators, not yet in verifiers")
        return replace(shape, packed=packed_sizes(folder, written, shape.matrices))
    except NotBuiltError as error:
        way = f"; {_ELSEWHERE}" if role == "generator" else ""
        way += "; --decoder auto runs what transformers builds, too" if decoder == "own" else ""
        raise UnsupportedModelError(f"model {folder}: {error}{way}") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {folder}: {error}") from error
    except InputError as error:
        raise UnsupportedModelError(f"config cannot be read: {error}; {_SUPPORTED}") from error
    except Exception as error:  # a value of a kind that no rule here foresees
        raise UnsupportedModelError(
            f"model {folder}: config.json holds what no model can be made of ({line_of(error)})"
        ) from error


def config_of(folder: Path) -> Any:
    """A model's config, as `transformers` reads it.

    Raises:
        UnsupportedModelError: if it cannot.
    """
    from transformers import AutoConfig  # noqa: PLC0415 (slow import)

    try:
        if folder.suffix == GGUF:
            return AutoConfig.for_model(**read_config(folder))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds; each is about what the file says
        said = f"config cannot be read ({line_of(error)}); {_SUPPORTED}"
        raise UnsupportedModelError(said) from error


def _own_shape(folder: Path, written: Mapping[str, Any], max_context: int | None) -> ModelShape:
    _check_known(written, FAMILIES)
    bundled = folder.parent == BUNDLED
    return _shape_of(SimpleNamespace(**written) if bundled else config_of(folder), max_context)


def _built_shape(folder: Path, written: Mapping[str, Any], max_context: int | None) -> ModelShape:
    """The shape of a model that `transformers` builds."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 (slow import)

    _check_known(written, CONFIG_MAPPING)
    from beamwright.models.survey import shape_of, survey  # noqa: PLC0415 (of torch)

    return shape_of(survey(config_of(folder)), max_context)


def _shape_of(config: Any, max_context: int | None) -> ModelShape:
    family, heads = FAMILIES[config.model_type], config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not 1 <= head_dim <= _WIDEST_HEAD:  # as many rotary frequencies are computed
        raise UnsupportedModelError(
            f"config.json: head_dim must be from 1 to {_WIDEST_HEAD:,}, not {head_dim:,}"
        )
    context = config.max_position_embeddings
    if max_context is not None:
        context = min(context, max_context)
    if (odd := family.oddity(config)) is not None:
        raise NotBuiltError(f"{config.model_type} with {odd} is not supported; {_SUPPORTED}")
    fields = {
        "intermediate": getattr(config, "intermediate_size", None),
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "tied": bool(config.tie_word_embeddings),
        **family.flags(config),
    }
    if fields["activation"] not in _ACTIVATIONS:
        raise NotBuiltError(f"activation {fields['activation']!r} is not supported; {_SUPPORTED}")
    fields["activation"] = _ACTIVATIONS[fields["activation"]]
    if "learned_positions" not in fields:
        fields["inv_freq"], fields["rope_scale"] = _rotary(config, head_dim)
    # Newer configs say `dtype`, older ones `torch_dtype`.
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
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
        stored_bfloat16=str(dtype).endswith("bfloat16"),
        groups=_groups(config, family.window(config), context, (kv_heads, head_dim)),
        **fields,
    )
    _check_numbers(shape)
    return shape


def _groups(
    config: Any, window: int | None, context: int, heads: tuple[int, int]
) -> tuple[LayerGroup, ...]:
    """Layers that see a window and those that see all, where a window is shorter than the context.

    heads: KV heads and their head_dim.
    """
    if window is None or window >= context:
        return ()
    if type(window) is not int or window < 1:
        raise UnsupportedModelError(f"config.json: sliding_window must be positive, not {window!r}")
    # Without a list of kinds, all layers are alike.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sliding = [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    if len(sliding) + len(full) != config.num_hidden_layers:
        raise NotBuiltError(f"layer types {sorted(set(kinds))} are not supported; {_SUPPORTED}")
    if not sliding:
        return ()
    groups = [LayerGroup(tuple(full), *heads)] if full else []
    return (*groups, LayerGroup(tuple(sliding), *heads, window))


def _check_known(values: Mapping[str, Any], known: Collection[str]) -> None:
    kind = values.get("model_type")
    if kind not in known:
        code = ", and the folder wants to run its own code (auto_map), which is never done"
        raise NotBuiltError(
            f"architecture {kind!r:.80} is not supported{code if values.get('auto_map') else ''}; "
            f"{_SUPPORTED}"
        )


def _check_weights(values: Mapping[str, Any]) -> None:
    if (quantised := quantisation(values)) is not None:
        try:
            check_method(quantised)
        except UnsupportedModelError as error:
            raise NotBuiltError(
                f"{error}: take the original checkpoint with --weights int4, a verifier's with "
                f"--verifier-weights int4; {_SUPPORTED}"
            ) from error


def _check_counts(values: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for the first count or width that is given and is none."""
    for name in _COUNTS:
        value = values.get(name)
        every = value if isinstance(value, list) else [value]  # of some families, one for a layer
        if value is not None and not all(type(v) is int and 1 <= v <= _LARGEST for v in every):
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
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise NotBuiltError(f"rope type {kind!r} is not supported; {_SUPPORTED}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotBuiltError(f"partial rotary positions are not supported; {_SUPPORTED}")
    if kind == "default":
        return frequencies(float(rope.get("rope_theta", 10_000.0)), head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 (slow import)

    freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return tuple(freq.double().tolist()), float(scale)
