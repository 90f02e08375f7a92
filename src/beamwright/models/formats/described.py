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
from beamwright.models.formats.header import KEPT, GgufHeader, read_header

GGUF = ".gguf"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes")
"""What a `quant_method` may be, see `forms`."""
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a model's config.json says that its weights are quantised; None if they are not."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    return found if isinstance(found, dict) else {}


def check_method(quantised: Mapping[str, Any]) -> str:
    """Which of METHODS a `quantization_config` names.

    Raises:
        UnsupportedModelError: for another one, and a variant that is not read.
    """
    method, form = quantised.get("quant_method"), quantised.get("format", "")
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
_UNUSUAL_SCALE = {"gemma2": 46, "gemma3": 62}  # by its layers, as llama.cpp knows them: of 27 B
_KEYS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
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
_SHARD = re.compile(r"(.*-)\d{5}(-of-)(\d{5})(\.gguf)")
_LONGEST = 1 << 20
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
    heads = metadata.get("llama.attention.head_count")
    found = {"attn_q": heads, "attn_k": metadata.get("llama.attention.head_count_kv", heads)}
    if not all(type(count) is int and count > 0 for count in found.values()):
        raise InputError(f"GGUF: {found} are no numbers of heads")
    return found  # type: ignore[return-value]


def read_config(file: Path) -> dict[str, Any]:
    """What a config.json of this model would hold.

    Raises:
        InputError: for a damaged file; UnsupportedModelError: for an architecture that is not read.
    """
    headers = [read_header(shard) for shard in shards(file)]
    metadata = headers[0].metadata
    tensors = {name: place for each in headers for name, place in each.tensors.items()}
    kind = metadata.get("general.architecture")
    if kind not in _MODELS or "token_embd.weight" not in tensors:
        known = ", ".join(_MODELS)
        raise UnsupportedModelError(f"GGUF architecture {kind!r:.80} is not read; known: {known}")
    given = {ours: metadata.get(f"{kind}.{key}") for key, ours in _KEYS.items()}
    config = {ours: value for ours, value in given.items() if value is not None}
    if type(context := config.get("max_position_embeddings")) is int:
        config["max_position_embeddings"] = min(context, _LONGEST)  # for each, angles are computed
    if kind == "llama" and "head_dim" not in config:
        config["head_dim"] = metadata.get("llama.rope.dimension_count")
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    window = metadata.get(f"{kind}.attention.sliding_window")
    rope = _rope(shards(file)[0], headers[0], f"{kind}.rope.")
    if kind in _UNUSUAL_SCALE:
        config["query_pre_attn_scalar"] = _query_scale(kind, config)
    if kind == "gemma3":
        near = metadata.get("gemma3.rope.freq_base_swa", 10_000.0)
        rope = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        }
    in_blocks = any(place.kind in KEPT for place in tensors.values())
    return config | {
        "model_type": "mistral" if window and kind == "llama" else _MODELS[kind],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "norm_topk_prob": kind == "qwen3moe",
        "sliding_window": window if kind in ("llama", *_UNUSUAL_SCALE) else None,
        "rope_parameters": rope,
        "eos_token_id": sorted({each for each in ids if type(each) is int}),
        "dtype": "bfloat16" if in_blocks else "float32",
    }


def _query_scale(kind: str, config: Mapping[str, Any]) -> int:
    """What Gemma's queries are divided by the root of."""
    width, heads, each = (
        config.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if not all(type(count) is int and count > 0 for count in (width, heads, each)):
        raise InputError(f"GGUF: {width}, {heads} and {each} are no sizes of heads")
    unusual = config.get("num_hidden_layers") == _UNUSUAL_SCALE[kind]
    return width // heads if unusual else each  # type: ignore[operator,return-value]


def _rope(file: Path, header: GgufHeader, at: str) -> dict[str, Any]:
    """Rotary positions as `transformers` describes them."""
    found = header.metadata
    rope = {"rope_theta": found.get(f"{at}freq_base", 10_000.0), "rope_type": "default"}
    kind = found.get(f"{at}scaling.type", "none")
    factor = found.get(f"{at}scaling.factor", found.get(f"{at}scale_linear", 1.0))
    if kind in ("linear", "yarn") and factor != 1.0:
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = found.get(f"{at}scaling.original_context_length")
            rope["original_max_position_embeddings"] = original
    elif kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"GGUF rope scaling {kind!r:.40} is not read")
    if (place := header.tensors.get("rope_freqs.weight")) is not None:
        with open(file, "rb") as stream:
            stream.seek(place.start)
            factors = struct.unpack(f"<{place.size // 4}f", stream.read(place.size))
        # Of llama 3: the slowest are divided by the factor, which with the rest says them all.
        rope |= {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
        if place.kind or any(map(_differs, factors, _llama3(rope, len(factors)))):
            raise UnsupportedModelError("GGUF rope factors other than Llama 3's are not read")
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
    if place.suffix == GGUF:
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
