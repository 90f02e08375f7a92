"""What a model's files say of how its weights are kept, and what a GGUF file says of all the rest.

That is a config as a Hugging Face one, and what tensors are called. Needs no torch.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_object
from beamwright.models.formats import known
from beamwright.models.formats.header import KEPT, Place, is_gguf, read_header

GGUF = ".gguf"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes")
"""What a `quant_method` may be, see `forms`."""
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # what is stored as in `fp8`
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a model's config.json says that its weights are quantised; None if they are not."""
    found = config.get("quantization_config") or config.get("compression_config")
    if config.get("quantization"):
        return {"quant_method": "MLX"}
    if not found:
        return None
    return found if isinstance(found, dict) else {}


def read_written(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the quantisation that only hf_quant_config.json tells of.

    Raises:
        InputError: for a file that is missing, or no JSON object.
    """
    written, file = read_object(folder / "config.json"), folder / "hf_quant_config.json"
    if file.is_file() and quantisation(written) is None:
        said = read_object(file).get("quantization")
        if isinstance(said, dict) and said.get("quant_algo"):
            written["quantization_config"] = {"quant_method": "modelopt", **said}
    return written


def check_method(quantised: Mapping[str, Any]) -> str:
    """Which of METHODS a `quantization_config` names.

    Raises:
        UnsupportedModelError: for another one, and a variant that is not read.
    """
    method, form = quantised.get("quant_method"), quantised.get("format", "")
    if method == "modelopt":
        form = quantised.get("quant_algo")
        method = "fp8" if form in _MODELOPT else f"modelopt {form}"
    if method is None and "config_groups" in quantised:
        method = "compressed-tensors"
    if method not in METHODS or (method == "compressed-tensors" and form not in _COMPRESSED):
        named = method if method not in METHODS else f"{method} {form}"
        raise UnsupportedModelError(
            f"weights quantised by {named or 'an unknown method'!s:.60} are not read "
            f"({', '.join(METHODS)} are)"
        )
    return str(method)


# --- GGUF --------------------------------------------------------------------------------------

_MODELS = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
}  # fmt: skip
_KNOWN = ", ".join(_MODELS)
_UNUSUAL_SCALE = {"gemma2": 46, "gemma3": 62}  # by its layers, as llama.cpp knows them: of 27 B
_PERIOD = {"gemma2": 2, "gemma3": 6}  # the last layer of each has no window
_COUNTS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
_EXPERT_COUNTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_OPTIONS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"hidden_act": "silu"} for name in ("llama", "mistral", "qwen2", "qwen3")},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
}  # fmt: skip
"""What no GGUF header says, because its architecture implies it; by model_type."""
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_AROUND = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_IN_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_SHARD = re.compile(r"(.*-)\d{5}(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
_LONGEST = 1 << 20
_LARGEST = 2**31 - 1
_BETAS = ("beta_fast", "beta_slow")
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shards(file: Path) -> list[Path]:
    """All files of a model, of which `file` is one."""
    match = _SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    before, of, count, after = match.groups()
    found = [file.with_name(f"{before}{n:05}{of}{count}{after}") for n in range(1, int(count) + 1)]
    for each in found:
        if not each.is_file():
            raise InputError(f"model {file}: shard {each.name} is missing")
    return found


class Names:
    """What tensors of one architecture are called; lifted: norms are stored with 1 added."""

    def __init__(self, kind: object) -> None:
        self.lifted = str(kind).startswith("gemma")
        self._layers = _LAYER_NAMES | (_AROUND if self.lifted and kind != "gemma" else {})
        self._ours = {ours: called for called, ours in (_NAMES | self._layers).items()}

    def theirs(self, name: str) -> tuple[str, int | None]:
        """What GGUF calls a tensor, and which expert of it is meant."""
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            stem, _, part = name.rpartition(".")
            return f"{self._ours.get(stem)}.{part}", None
        layer, stem, part = match.groups()
        if (expert := _EXPERT.fullmatch(stem)) is not None:
            return f"blk.{layer}.ffn_{expert[2]}_exps.{part}", int(expert[1])
        return f"blk.{layer}.{self._ours.get(stem)}.{part}", None

    def hugging_face(self, name: str, count: int) -> list[str]:
        """A tensor's names in a checkpoint of `transformers`: one, one per expert, or none."""
        stem, _, part = name.rpartition(".")
        if stem in _NAMES:
            return [f"{_NAMES[stem]}.{part}"]
        _, layer, called = [*stem.split(".", 2), "", ""][:3]
        at = f"model.layers.{layer}"
        if (match := _EXPERTS.fullmatch(called)) is not None:
            return [f"{at}.mlp.experts.{one}.{match[1]}_proj.{part}" for one in range(count)]
        return [f"{at}.{self._layers[called]}.{part}"] if called in self._layers else []


def permuted_heads(metadata: dict[str, Any]) -> dict[str, int]:
    """How many heads the tensors have whose rotary pairs stand beside each other."""
    if metadata.get("general.architecture") != "llama":
        return {}
    heads = _count(metadata, "llama.attention.head_count")
    return {"attn_q": heads, "attn_k": _count(metadata, "llama.attention.head_count_kv", heads)}


def refuse(*faults: tuple[bool, str]) -> None:
    """
    Raises:
        UnsupportedModelError: with the line of the first fault that there is.
    """
    for is_there, line in faults:
        if is_there:
            raise UnsupportedModelError(line)


def _count(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive number, the same in all layers."""
    value = given.get(key, default)
    first, *others = {*value} if isinstance(value, list) and value else {value}
    wrong = bool(others) or type(first) is not int or not 0 < first <= _LARGEST
    refuse((wrong, f"the GGUF header's {key} is {value!r:.60}, not one count for all layers"))
    return int(first)


def read_config(file: Path) -> dict[str, Any]:
    """What a config.json of this model would hold.

    Raises:
        InputError: for a damaged file; UnsupportedModelError: for an architecture that is not read,
            and a key that says what is not implemented.
    """
    headers = {shard: read_header(shard) for shard in shards(file)}
    metadata = next(iter(headers.values())).metadata
    tensors = {name: (at, place) for at in headers for name, place in headers[at].tensors.items()}
    kind, what = metadata.get("general.architecture", ""), metadata.get("general.type", "model")
    parts, held = metadata.get("split.count") or 1, "other weights" if tensors else "a vocabulary"
    refuse(
        (what != "model", f"the GGUF file holds no model: its general.type is {what!r:.40}"),
        (kind not in _MODELS, f"GGUF architecture {kind!r:.80} is not read; known: {_KNOWN}"),
        (parts != len(headers), f"one of {parts} files, not named -00001-of-{parts:0>5}.gguf etc."),
        ("token_embd.weight" not in tensors, f"the GGUF file holds {held} alone, no whole model"),
    )
    given = {k.removeprefix(f"{kind}."): v for k, v in metadata.items() if k.startswith(f"{kind}.")}
    known.GGUF[kind].check([f"{kind}.{key}" for key, v in given.items() if v], f"model {file}")
    needed = _COUNTS | (_EXPERT_COUNTS if kind.endswith("moe") else {})
    config: dict[str, Any] = {ours: _count(given, key) for key, ours in needed.items()}
    config |= {ours: given[key] for key, ours in _OPTIONS.items() if key in given}
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    usual = config["hidden_size"] // heads
    width = _count(given, "attention.key_length", usual)
    widths = [
        _count(given, key, width) for key in ("attention.value_length", "rope.dimension_count")
    ]
    causal, last = given.get("attention.causal", True), f"blk.{layers - 1}.attn_norm.weight"
    refuse(
        (widths != [width] * 2, f"heads of {width} with values, rotary positions of {widths}"),
        (last not in tensors, f"the GGUF header says {layers:,} layers, which are not all there"),
        (causal is not True, "attention to later tokens (attention.causal) is not read"),
    )
    # For each position, angles are computed.
    config["max_position_embeddings"] = min(config["max_position_embeddings"], _LONGEST)
    window = given.get("attention.sliding_window", 4096 if kind == "gemma2" else None)
    rope = _rope(given, 1e6 if kind == "gemma3" else 1e4, config["max_position_embeddings"])
    if (found := tensors.get("rope_freqs.weight")) is not None:
        rope = _of_llama3(*found, rope, kind)
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
    # Biases of queries, keys and values alone: what a Qwen 2 has beside a Llama.
    biases = [f"blk.0.attn_{part}.bias" in tensors for part in ("q", "output")]
    model_type = "qwen2" if kind == "llama" and biases == [True, False] else _MODELS[kind]
    in_blocks = any(place.kind in KEPT for _, place in tensors.values())
    model_type = "mistral" if window and kind == "llama" else model_type
    config = {"rms_norm_eps": 1e-6, **_DEFAULTS.get(model_type, {}), **config}
    return config | {
        "model_type": model_type,
        "num_key_value_heads": _count(given, "attention.head_count_kv", heads),
        "head_dim": width,
        "vocab_size": tensors["token_embd.weight"][1].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(biases),
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "norm_topk_prob": kind == "qwen3moe",
        "sliding_window": window,
        "rope_parameters": rope,
        "dtype": "bfloat16" if in_blocks else "float32",
    }


def gguf_remarks(file: Path) -> tuple[str, ...]:
    """Keys of a GGUF file that are not read, a line each."""
    found = read_header(shards(file)[0]).metadata
    others = [key for key in found if not key.startswith(f"{found.get('general.architecture')}.")]
    return known.GGUF_FILE.check(others, f"model {file}")


def _rope(given: Mapping[str, Any], theta: float, context: int) -> dict[str, Any]:
    """Rotary positions as `transformers` describes them. theta: where the header does not say."""
    at, rope = "rope.scaling.", {"rope_theta": given.get("rope.freq_base", theta)}
    kind, scale = given.get(f"{at}type", "linear"), given.get(f"{at}attn_factor", 1.0)
    factor = given.get(f"{at}factor", given.get("rope.scale_linear")) or 1.0
    odd = kind not in ("none", "linear", "yarn") or (scale != 1.0 and kind != "yarn")
    refuse((odd, f"GGUF rope scaling {kind!r:.40} with attn_factor {scale} is not read"))
    if kind == "none" or factor == scale == 1.0:
        return rope | {"rope_type": "default"}
    if kind == "yarn":
        scale *= given.get(f"{at}yarn_attn_factor", 1 + 0.1 * math.log(max(factor, 1.0)))
        original = given.get(f"{at}original_context_length", context)
        rope |= {"attention_factor": scale, "original_max_position_embeddings": original}
        rope |= {key: given[f"{at}yarn_{key}"] for key in _BETAS if f"{at}yarn_{key}" in given}
    return rope | {"rope_type": kind, "factor": factor}


def _of_llama3(file: Path, place: Place, rope: dict[str, Any], kind: str) -> dict[str, Any]:
    """The same with the factors that a file has for each frequency, if they are Llama 3's.

    Of these the slowest are divided by the factor, which with the rest says them all.
    """
    with open(file, "rb") as stream:
        stream.seek(place.start)
        factors = struct.unpack(f"<{place.size // 4}f", stream.read(place.size))
    rope |= {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    differs = any(map(_differs, factors, _llama3(rope, len(factors))))
    odd = bool(place.kind) or differs or kind != "llama"
    refuse((odd, "GGUF rope factors other than Llama 3's are not read"))
    return rope


def _llama3(rope: dict[str, Any], count: int) -> Iterator[float]:
    """What each frequency is divided by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for number in range(count):
        wave = 2 * math.pi * float(rope["rope_theta"]) ** (number / count)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - smooth) / rope["factor"] + smooth)


def _differs(found: float, expected: float) -> bool:
    return not math.isclose(found, expected, rel_tol=1e-3)


def packed_sizes(
    place: Path, config: Mapping[str, Any], matrices: Iterable[tuple[int, int, int]]
) -> tuple[int, int] | None:
    """Of all layers' projections: bytes of those that stay quantised, values of the others.

    config: of the folder or file `place`. matrices: rows and columns of projections, how many.
    """
    if is_gguf(place):
        return _kept_sizes(place)
    if (form := _bits_and_group(quantisation(config) or {})) is None:
        return None
    bits, group = form
    packed = 0
    for rows, columns, count in matrices:
        each = group if group > 0 else columns
        packed += count * (rows * columns // each * (each * bits // 8 + bits))
    return packed, 0


def _bits_and_group(quantised: Mapping[str, Any]) -> tuple[int, int] | None:
    """How projections stay in memory: 4 or 8 bits a code, columns of a group (-1: all)."""
    groups = quantised.get("config_groups")
    if isinstance(groups, dict) and groups:
        quantised = {**next(iter(groups.values()))["weights"], "desc_act": False}
        if quantised.get("type") != "int":
            return None
    elif quantised.get("load_in_8bit"):
        return 8, -1
    elif quantised.get("quant_method") not in ("awq", "gptq") or quantised.get("desc_act"):
        return None
    bits, group = quantised.get("bits", quantised.get("num_bits")), quantised.get("group_size")
    return (4 if int(bits or 8) <= 4 else 8), int(group or -1)


def block_sizes(place: Path) -> tuple[int, int] | None:
    """Of a GGUF file: bytes of blocks, as `models.native` keeps them, and values of other tensors.

    Rows of an embedding stay in the file, if it is not the LM head.
    """
    if not is_gguf(place):
        return None
    tensors = {n: t for shard in shards(place) for n, t in read_header(shard).tensors.items()}
    head = tensors.get("output.weight", tensors.get("token_embd.weight"))
    if head is not None and head.kind in KEPT and "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    blocks = plain = 0
    for each in tensors.values():
        if each.kind not in KEPT:
            plain += math.prod(each.shape)
            continue
        *matrices, rows, columns = each.shape
        row = each.size // (math.prod(matrices) * rows)
        row += columns // 256 * 4 * (each.kind in _FACTORS_OF_SIX)
        blocks += math.prod(matrices) * -(-rows // _TILE_ROWS) * _TILE_ROWS * row
    return blocks, plain


_TILE_ROWS = 16
_FACTORS_OF_SIX = (12, 13)  # types whose factors of 6 bits are kept in 8: 4 bytes in 256 weights


def _kept_sizes(file: Path) -> tuple[int, int]:
    packed = plain = 0
    for shard in shards(file):
        for name, place in read_header(shard).tensors.items():
            if not name.startswith("blk.") or len(place.shape) < 2:
                continue
            bits, group = KEPT.get(place.kind, (0, 1))
            values = math.prod(place.shape)
            packed += values // group * (group * bits // 8 + bits) if bits else 0
            plain += 0 if bits else values
    return packed, plain
