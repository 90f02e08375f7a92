"""Write qwen2 checkpoints as GGUF: rounded to nearest, with types chosen as by llama.cpp."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

_ALIGNMENT = 32
_KINDS = {"F32": 0, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
_KINDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
# Types of a file's matrices, and of those that need more bits.
MIXES = {
    "BF16": ("BF16", "BF16"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K"),
}
_SHORT = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for widths that are no multiple of 256
_LONG_BLOCK = 256
_NAMES = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm"},
    "post_attention_layernorm": "ffn_norm",
}


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View numbers [blocks, n] as bytes [blocks, bytes]."""
    return values.contiguous().view(torch.uint8)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scale.float().clamp(min=1e-12)).round().clamp(-127, 127)
    return torch.cat([_bytes(scale), _bytes(codes.to(torch.int8))], dim=1)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = (blocks.abs().amax(-1, keepdim=True) / 15).half()
    codes = (blocks / scale.float().clamp(min=1e-12)).round().clamp(-16, 15).long() + 16
    upper = ((codes >> 4).view(-1, 4, 8) << torch.arange(8)).sum(-1)
    lower = codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4
    return torch.cat([_bytes(scale), upper.to(torch.uint8), lower.to(torch.uint8)], dim=1)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    ends = [((high - low) / 31).half(), low.half()]
    codes = ((blocks - ends[1]) / ends[0].float().clamp(min=1e-12)).round().clamp(0, 31).long()
    upper = ((codes >> 4).view(-1, 4, 8) << torch.arange(8)).sum(-1)
    lower = codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4
    return torch.cat([*map(_bytes, ends), upper.to(torch.uint8), lower.to(torch.uint8)], dim=1)


def q_k(bits: int, blocks: torch.Tensor) -> torch.Tensor:
    """Quantise blocks to Q4_K or Q5_K."""
    parts, most = blocks.view(-1, 8, 32), 2**bits - 1
    low = (-parts.amin(-1)).clamp(min=0)
    step = (parts.amax(-1) + low).clamp(min=0) / most
    whole = [(each.amax(-1, keepdim=True) / 63).half() for each in (step, low)]
    scales, lows = (
        (each / unit.float().clamp(min=1e-12)).round().clamp(0, 63).long()
        for each, unit in zip((step, low), whole, strict=True)
    )
    real = (scales * whole[0].float())[..., None].clamp(min=1e-12)
    codes = ((parts + (lows * whole[1].float())[..., None]) / real).round().clamp(0, most).long()
    first, later = (scales[:, :4], lows[:, :4]), (scales[:, 4:], lows[:, 4:])
    six = [each | rest >> 4 << 6 for each, rest in zip(first, later, strict=True)]
    packed = torch.cat([*six, later[0] & 15 | (later[1] & 15) << 4], dim=1)
    fifth = ((codes >> 4) << torch.arange(8)[:, None]).sum(1)
    pairs = (codes & 15).view(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    planes = [packed, *[fifth] * (bits - 4), nibbles]
    return torch.cat([*map(_bytes, whole), *(each.to(torch.uint8) for each in planes)], dim=1)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    parts = blocks.view(-1, 16, 16)
    step = parts.abs().amax(-1) / 31
    whole = (step.amax(-1, keepdim=True) / 127).half()
    scales = (step / whole.float().clamp(min=1e-12)).round().clamp(1, 127)
    real = (scales * whole.float())[..., None].clamp(min=1e-12)
    codes = (parts / real).round().clamp(-32, 31).long().view(-1, 2, 4, 32) + 32
    lower = codes & 15
    nibbles = (lower[:, :, :2] | lower[:, :, 2:] << 4).flatten(1)
    upper = ((codes >> 4) << torch.arange(0, 8, 2)[:, None]).sum(2).flatten(1)
    shown = [nibbles.to(torch.uint8), upper.to(torch.uint8), _bytes(scales.to(torch.int8))]
    return torch.cat([*shown, _bytes(whole)], dim=1)


# Values per block; function from float32 [n, values] to bytes [n, bytes].
QUANTISE: Mapping[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q5_0": (32, q5_0),
    "Q8_0": (32, q8_0),
    "Q5_1": (32, q5_1),
    "Q4_K": (_LONG_BLOCK, partial(q_k, 4)),
    "Q5_K": (_LONG_BLOCK, partial(q_k, 5)),
    "Q6_K": (_LONG_BLOCK, q6_k),
}


def kind_of(name: str, weight: torch.Tensor, mix: str) -> str:
    """Choose a tensor's type; widths that are no multiple of 256 use short blocks."""
    if weight.dim() == 1:
        return "F32"
    parts = "token_embd", "output.", "attn_v", "ffn_down"
    finer = any(part in name for part in parts) and "attn_output" not in name
    kind = MIXES[mix][finer]
    return _SHORT.get(kind, kind) if weight.shape[-1] % _LONG_BLOCK else kind


def encode_text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def encode_value(value: Any) -> bytes:
    """Encode a metadata value behind its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + encode_text(value)
    # llama.cpp requires signed token types.
    kind = struct.pack("<I", 5) if isinstance(value[0], int) else encode_value(value[0])[:4]
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(value))
        + b"".join(encode_value(each)[4:] for each in value)
    )


def metadata(folder: Path, mix: str) -> dict[str, Any]:
    """Return a qwen2 checkpoint's GGUF metadata: shape, tokens and chat template."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    how = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = how.get("chat_template")
    if template is None:
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    words = tokenizer["model"]["vocab"]
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(words, key=words.__getitem__)
    tokens += [f"<unused {id}>" for id in range(len(tokens), config["vocab_size"])]
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config.get("rope_parameters", config)["rope_theta"]),
    }
    return {
        **{"general.architecture": "qwen2", "general.name": f"random {mix}"},
        **{f"qwen2.{name}": value for name, value in sizes.items()},
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"},
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(each) for each in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def gguf_name(name: str) -> str:
    """Return a tensor's name in a GGUF file."""
    stem, _, part = name.rpartition(".")
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in plain:
        return f"{plain[stem]}.{part}"
    _, _, number, inner = stem.split(".", 3)
    return f"blk.{number}.{_NAMES[inner]}.{part}"


def write_gguf(folder: Path, file: Path, mix: str) -> None:
    """Write a qwen2 checkpoint as one GGUF file. mix: a key of `MIXES`.

    Raises:
        ValueError: if the checkpoint is of another type.
    """
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen2":
        raise ValueError(f"{folder.name} is {config['model_type']}; only qwen2 is written as GGUF")
    with safe_open(folder / "model.safetensors", framework="pt") as source, open(file, "wb") as out:
        names = list(source.keys())
        plan, offset = [], 0
        for name in names:
            weight = source.get_tensor(name)
            kind = kind_of(gguf_name(name), weight, mix)
            size = weight.numel() * (2 if kind == "BF16" else 4)
            if kind in QUANTISE:
                values, quantise = QUANTISE[kind]
                size = weight.numel() // values * quantise(torch.zeros(1, values)).numel()
            plan.append((name, tuple(weight.shape), kind, offset))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        facts = metadata(folder, mix)
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(plan), len(facts)))
        for key, value in facts.items():
            out.write(encode_text(key) + encode_value(value))
        for name, shape, kind, at in plan:
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            out.write(encode_text(gguf_name(name)) + sizes + struct.pack("<IQ", _KINDS[kind], at))
        _pad(out)
        for name, _, kind, _ in plan:
            weight = source.get_tensor(name)
            if kind in QUANTISE:
                values, quantise = QUANTISE[kind]
                weight = quantise(weight.float().reshape(-1, values))
            else:
                weight = weight.to(torch.bfloat16 if kind == "BF16" else torch.float32)
            out.write(weight.contiguous().view(torch.uint8).numpy())
            _pad(out)


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % _ALIGNMENT))
