"""A GGUF file of one shape, Qwen2, from its Hugging Face folder. Runs in the peers' environment.

The vocabulary has no texts in it: the worker gives and takes token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER[part]}"


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write `folder` (tied embeddings) with matrices of `kind`: F32, BF16 or Q8_0; vectors F32."""
    import gguf
    import torch
    from gguf import GGMLQuantizationType
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    partial = file.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "qwen2")
    _write_shape(writer, config)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    quantisation = GGMLQuantizationType[kind]
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (this is no mapping)
            values = tensors.get_tensor(name).to(torch.float32).numpy()
            own = quantisation if values.ndim > 1 else GGMLQuantizationType.F32
            data = values if own == GGMLQuantizationType.F32 else gguf.quantize(values, own)
            writer.add_tensor(gguf_name(name), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


_FILE_TYPES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_name("random")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
