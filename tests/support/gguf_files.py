"""Writes small GGUF files: a header, metadata and tensors, in blocks of random codes or plain."""

from __future__ import annotations

import json
import struct

import torch

from beamwright.models.formats.gguf_metadata import TensorNameMap
from beamwright.models.formats.header import BLOCKS
from beamwright_lab.models.gguf_files import encode_text, encode_value

HALVES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 10: (80, 82), 11: (108,), 12: (0, 2),
          13: (0, 2), 14: (208,), 20: (0,), 23: (0,)}  # fmt: skip
"""Where a block of each type has numbers in float16."""
KINDS = {name: kind for kind, (name, _, _) in BLOCKS.items()}


def draw_blocks(kind, values, seed=0, scale=0.02):
    """Random blocks uint8 [count, bytes] of a type, whose values are about as large as weights."""
    _, per_block, size = BLOCKS[kind]
    draws = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (values // per_block, size), generator=draws, dtype=torch.uint8)
    for at in HALVES[kind]:
        levels = {14: 600, 12: 500, 13: 900, 8: 100, 10: 30, 11: 100, 20: 80, 23: 2000}.get(
            kind, 12
        )
        half = torch.rand(len(blocks), generator=draws).add_(0.5).mul_(scale / levels)
        blocks[:, at : at + 2] = half.half().view(torch.uint8).view(-1, 2)
    return blocks


def write_gguf(path, metadata, tensors, alignment=32):
    """tensors: by name, (type, shape outermost first, bytes)."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [encode_text(key) + encode_value(value) for key, value in metadata.items()]
    at, data = 0, []
    for name, (kind, shape, content) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head.append(encode_text(name) + sizes + struct.pack("<IQ", kind, at))
        data.append(content + bytes(-len(content) % alignment))
        at += len(data[-1])
    start = b"".join(head)
    path.write_bytes(start + bytes(-len(start) % alignment) + b"".join(data))


def permuted(weight, heads):
    """Rows in llama.cpp's order: rotary pairs beside each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def metadata_of(folder, kind):
    """What llama.cpp's converter says of a checkpoint folder of `transformers`."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = {**tokenizer["model"]["vocab"]}
    tokens = sorted(vocab, key=vocab.get)
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config["vocab_size"])]
    rope = config["rope_parameters"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    sizes = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    return {
        "general.architecture": kind,
        **{f"{kind}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<bos>{{ m['content'] }}{% endfor %}",
    }


def tensors_of(model, kind, types):
    """The tensors of a model of `transformers`, for `write_gguf`, and its new weights by name.

    types: of a GGUF name without layer, such as "attn_q", the type of its blocks, drawn at random;
    "*" for all projections. Others are F32.
    """
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors, changed, names = {}, {}, TensorNameMap(kind)
    for number, (name, weight) in enumerate(model.state_dict().items()):
        if weight.dim() == 3:
            changed[name] = _experts(tensors, name, weight, KINDS[types["*"]], number)
            continue
        called, _ = names.gguf_name(name)
        assert names.hugging_face_names(called, 1) == [name]
        if called == "output.weight" and model.config.tie_word_embeddings:
            continue
        part = called.split(".")[-2]
        of_blocks = types.get(part, types.get("*") if "proj" in name else None)
        count = heads.get(part) if kind == "llama" else None
        if of_blocks is not None and name.endswith("weight"):
            from transformers.integrations.gguf.dequant import dequantize

            blocks = draw_blocks(KINDS[of_blocks], weight.numel(), number)
            values = dequantize(blocks.flatten(), KINDS[of_blocks]).view(weight.shape)
            rows = values
            if count:  # what lies in the file is permuted already
                rows = values.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
            changed[name] = rows
            tensors[called] = KINDS[of_blocks], tuple(weight.shape), blocks.numpy().tobytes()
            continue
        stored = permuted(weight, count) if count else weight
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            stored = weight + 1
        tensors[called] = 0, tuple(weight.shape), stored.contiguous().numpy().tobytes()
    return tensors, changed


def _experts(tensors, name, weight, kind, number):
    """All experts' projections, gate and up apart, in random blocks; the values of these."""
    from transformers.integrations.gguf.dequant import dequantize

    parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    values = []
    for seed, (part, rows) in enumerate(zip(parts, weight.chunk(len(parts), 1), strict=True)):
        blocks = draw_blocks(kind, rows.numel(), 100 * number + seed)
        values.append(dequantize(blocks.flatten(), kind).view(rows.shape))
        called = f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"
        tensors[called] = kind, tuple(rows.shape), blocks.numpy().tobytes()
    return torch.cat(values, 1)


def write_model(path, folder, model, kind, types, **more):
    """A GGUF file of a checkpoint, its projections in random blocks, which `model` then has, too.

    more: metadata.
    """
    tensors, changed = tensors_of(model, kind, types)
    model.load_state_dict(changed, strict=False)
    write_gguf(path, metadata_of(folder, kind) | more, tensors)
    return path
