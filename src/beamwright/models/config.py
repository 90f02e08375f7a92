"""Which checkpoint folder an option means, and its config.json as a ModelShape.

The one reader of Hugging Face configs. It refuses, naming what is supported, whatever would make
the decoder compute something else than the checkpoint means. Code that a folder brings along
(`auto_map`) is never run. `transformers` reads configs, but those that leave nothing to it, the
bundled pair's and a GGUF file's: importing it takes a second.
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
    block_sizes,
    check_method,
    packed_sizes,
    quantisation,
    read_config,
    read_written,
    shards,
)
from beamwright.models.formats.files import adapter_of
from beamwright.models.formats.header import is_gguf
from beamwright.models.formats.known import CONFIGS, QUANTISATION, said
from beamwright.models.named import (
    NAMED_SHAPES,
    SUPPORTED,
    capped,
    named_shape,
    rotary,
    scales_positions,
    shape_from_text,
)
from beamwright.models.shape import FAMILIES, LayerGroup, ModelShape, NotBuiltError
from beamwright.sections import ELSEWHERE, DecoderChoice, ModelSettings

BUNDLED = Path(__file__).parent.parent / "bundled"
_ANY_GGUF = "*.[gG][gG][uU][fF]"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Of all families.
_COUNTS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "intermediate_size", "ffn_dim", "word_embed_proj_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_FIELD = re.compile(r"[Ff]ield '(\w+)'|(RoPE)")
_LARGEST = 2**31 - 1
_WIDEST_HEAD = 2**14
_LONGEST_LINE = 200
_ELSEWHERE = (
    "--model openai:URL#NAME (a server that runs it) takes it today, with tree and verifier here"
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
    if is_gguf(folder):
        return shards(folder)[0]
    if not folder.is_dir():
        raise InputError(_in_vllm(spec) or f"{option}: {_instead(spec, role, known)}")
    if (file := _gguf_in(folder)) is not None:
        return resolve_folder(str(file), role)
    if not (folder / "config.json").is_file():
        raise InputError(f"{spec}: {adapter_of(folder) or 'no config.json in this folder'}")
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
    found = sorted(folder.rglob(_ANY_GGUF) if tag else folder.glob(_ANY_GGUF))
    found = [file for file in found if tag.lower() in file.name.lower()]
    if not found or (not tag and any(folder.glob("*.safetensors"))):
        return None
    models = [file for file in found if "mmproj" not in file.name and file in shards(file)[:1]]
    if len(models) != 1:
        names = ", ".join(file.name for file in models)[:_LONGEST_LINE]
        raise InputError(f"{folder}: which of its GGUF files? {names}")
    return models[0]


def _in_vllm(spec: str) -> str | None:
    """How vLLM has a model, where its engine is named as there once was."""
    kind, _, place = spec.partition(":")
    name = place.removeprefix("hf:").partition("?")[0] or "PATH"
    url = f"openai:http://127.0.0.1:8000/v1#{name}"
    return f"vllm: start `vllm serve {name}` and name it: --model {url}" if kind == "vllm" else None


def _instead(spec: str, role: str, known: str) -> str:
    """What is wrong with a place that is no folder."""
    folder = Path(spec)
    if folder.is_file():
        if folder.suffix.lower() == GGUF:
            return "no GGUF file: it begins with something else (was all of it downloaded?)"
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
    what = "no such file" if folder.suffix.lower() == GGUF else "no such folder"
    return f"{what}; {hint}" if hint else what


def tokenizer_folder(spec: str, written: str) -> Path:
    """The folder with the tokenizer that a name means; ORG/NAME is a model of the hub where there
    is no such folder, as servers name theirs. Raises what `resolve_folder` does.
    """
    hub = spec.removeprefix("hf:")
    if spec.startswith("hf:") or (_HUB_NAME.fullmatch(spec) and not Path(spec).is_dir()):
        return _download(hub, weights=False)
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
        written = read_config(folder) if is_gguf(folder) else read_written(folder)
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
        packed = packed_sizes(folder, written, shape.matrices)
        return replace(shape, packed=packed, blocks=packed and block_sizes(folder))
    except NotBuiltError as error:
        way = f"; {_ELSEWHERE}" if role == "generator" else ""
        way += "; --decoder auto runs what transformers builds, too" if decoder == "own" else ""
        raise UnsupportedModelError(f"model {folder}: {error}{way}") from error
    except InputError as error:
        line = str(error)
        if not isinstance(error, UnsupportedModelError) and not is_gguf(folder):
            line = f"config cannot be read: {line}; {SUPPORTED}"
        elif not line.startswith("model "):
            line = f"model {folder}: {line}"
        raise UnsupportedModelError(line) from error
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
        if is_gguf(folder):
            return AutoConfig.for_model(**read_config(folder))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds; each is about what the file says
        key = _FIELD.search(str(error))
        what = f"config.json: {key[1]} cannot be so" if key else "config.json makes no model"
        raise UnsupportedModelError(f"{what} ({line_of(error)}); {SUPPORTED}") from error


def _own_shape(folder: Path, written: Mapping[str, Any], max_context: int | None) -> ModelShape:
    _check_known(written, FAMILIES)
    whole = folder.parent == BUNDLED or (is_gguf(folder) and not scales_positions(written))
    return _shape_of(SimpleNamespace(**written) if whole else config_of(folder), max_context)


def _built_shape(folder: Path, written: Mapping[str, Any], max_context: int | None) -> ModelShape:
    """The shape of a model that `transformers` builds."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 (slow import)

    _check_known(written, CONFIG_MAPPING)
    from beamwright.models.survey import shape_of, survey  # noqa: PLC0415 (of torch)

    return shape_of(survey(config_of(folder)), max_context)


def _shape_of(given: Any, max_context: int | None) -> ModelShape:
    _check_known({"model_type": given.model_type}, FAMILIES)  # a mistral may be a ministral
    # What the modules of `transformers` do not read has no effect: a window in a llama's config.
    used = CONFIGS[given.model_type].used
    # The older name of `dtype` is an alias whose look-up is remarked upon.
    keys = (key for key in used if key != "torch_dtype" and hasattr(given, key))
    config = SimpleNamespace(**{key: getattr(given, key) for key in keys})
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
        raise NotBuiltError(f"{config.model_type} with {odd} is not supported; {SUPPORTED}")
    fields = {
        "intermediate": getattr(config, "intermediate_size", None),
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "tied": bool(config.tie_word_embeddings),
        **family.flags(config),
    }
    if fields["activation"] not in _ACTIVATIONS:
        raise NotBuiltError(f"activation {fields['activation']!r} is not supported; {SUPPORTED}")
    fields["activation"] = _ACTIVATIONS[fields["activation"]]
    if "learned_positions" not in fields:
        fields |= rotary(given, head_dim)
    if fields.get("lifted"):
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
    """Layers that see a window and those that see all, where a window is shorter than the context.

    heads: KV heads and their head_dim.
    """
    if window is None or window >= context:
        return ()
    if type(window) is not int or window < 1:
        raise UnsupportedModelError(f"config.json: sliding_window must be positive, not {window!r}")
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sliding = [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    if len(sliding) + len(full) != config.num_hidden_layers:
        raise NotBuiltError(f"layer types {sorted(set(kinds))} are not supported; {SUPPORTED}")
    if not sliding:
        return ()
    groups = [LayerGroup(tuple(full), *heads)] if full else []
    return (*groups, LayerGroup(tuple(sliding), *heads, window))


def _check_known(values: Mapping[str, Any], known: Collection[str]) -> None:
    kind = values.get("model_type")
    if str(kind) not in known:
        code = ", and the folder wants to run its own code (auto_map), which is never done"
        raise NotBuiltError(
            f"architecture {kind!r:.80} is not supported{code if values.get('auto_map') else ''}; "
            f"{SUPPORTED}"
        )


def _check_weights(values: Mapping[str, Any]) -> None:
    if (quantised := quantisation(values)) is not None:
        try:
            check_method(quantised)
            QUANTISATION.check(said(quantised), "config.json")
        except UnsupportedModelError as error:
            raise NotBuiltError(
                f"{error}: take the original checkpoint with --weights int4, a verifier's with "
                f"--verifier-weights int4; {SUPPORTED}"
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
    numbers = {
        "rope": (*shape.inv_freq, *shape.near_freq, shape.rope_scale),
        "rms_norm_eps": (shape.norm_eps,),
    }
    for name, values in numbers.items():
        if not all(isinstance(v, float | int) and math.isfinite(v) and v >= 0 for v in values):
            raise UnsupportedModelError(f"config.json: its {name} gives no finite numbers")
