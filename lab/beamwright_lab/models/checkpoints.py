"""Write tiny random checkpoints of many architectures with `transformers`.

Each has the bundled pair's tokenizer, at least three layers, and weights large enough that
attention, experts and windows matter to the log-probabilities.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from beamwright.models.hub import BUNDLED

_SOURCE = BUNDLED / "generator"
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
_MLA = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "head_dim": 16, "num_key_value_heads": 4},
}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_SSM = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
    "num_hidden_layers": 4,
}
_ALTERNATE = ["sliding_attention", "full_attention"] * 2

_COMMON: Mapping[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}

# Config fields by `model_type`, beside `_COMMON`; None removes a field.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    # Supported by our own decoder.
    "llama": {},
    "mistral": {"sliding_window": 32},
    "qwen2": {},
    "qwen3": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    # Dense.
    "apertus": {},
    "arcee": {},
    "bloom": {"n_layer": 3, "n_head": 4},
    "cohere": {},
    "cohere2": {"sliding_window": 32, "num_hidden_layers": 4},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 32, "layer_types": _ALTERNATE, "num_hidden_layers": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "gemma": {},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 16, "layer_types": _ALTERNATE, "num_hidden_layers": 4},
    "gemma3n_text": {
        **{"sliding_window": 16, "layer_types": _ALTERNATE * 2, "num_hidden_layers": 8},
        **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "intermediate_size": 128},
        **{"vocab_size_per_layer_input": 562, "laurel_rank": 8},
        "activation_sparsity_pattern": [0.0] * 8,
    },
    "gemma4_text": {
        **{"sliding_window": 16, "layer_types": _ALTERNATE * 2, "num_hidden_layers": 8},
        **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
        **{"vocab_size_per_layer_input": 562},
    },
    "glm": {},
    "glm4": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "granite": {
        **{"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
        **{"attention_multiplier": 0.2, "logits_scaling": 2.0},
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "ministral": {"sliding_window": 32, "layer_types": _ALTERNATE, "num_hidden_layers": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 64, "num_hidden_layers": 4},
    "phi": {},
    "phi3": {"sliding_window": 64},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "stablelm": {},
    "starcoder2": {"sliding_window": 32},
    # Mixtures of experts.
    "deepseek_v2": {**_DEEPSEEK, **_MLA},
    "deepseek_v3": {**_DEEPSEEK, **_MLA},
    "dots1": dict(_DEEPSEEK),
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "glm4_moe": dict(_DEEPSEEK),
    "gpt_oss": {**_LOCAL, "sliding_window": 16, "num_hidden_layers": 4},
    "granitemoe": {**_LOCAL, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "llama4_text": {
        **{"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128},
        **{"attention_chunk_size": 64, "num_hidden_layers": 4},
    },
    "mixtral": {**_LOCAL, "sliding_window": 64},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {**_LOCAL, "sliding_window": 64},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": dict(_MOE),
    # Recurrent layers.
    "bamba": {**_SSM, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_SSM, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **{**_SSM, "num_local_experts": 0, "shared_intermediate_size": 64},
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "jamba": {**_MOE, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {
        **{"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
        **{**_MOE, "num_experts": 4, "num_dense_layers": 1},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "minimax": {
        **{**_LOCAL, "num_hidden_layers": 4},
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
        **{"num_hidden_layers": 4, "chunk_size": 32},
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    },
    "olmo_hybrid": {**_LINEAR, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**_LINEAR, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": dict(_LINEAR),
    "qwen3_next": {**_LINEAR, **_MOE, "shared_expert_intermediate_size": 32},
}
# Their router weights are equal in pairs, so that two experts tie for every token.
TIED_ROUTERS = ("qwen3_moe",)


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write an architecture's float32 checkpoint from a fixed seed; return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    vocab = json.loads((_SOURCE / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    fields = {"vocab_size": vocab, **_COMMON, **ARCHITECTURES[name]}
    config = AutoConfig.for_model(name, **{k: v for k, v in fields.items() if v is not None})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for parameter_name, parameter in model.named_parameters():
            if name in TIED_ROUTERS and parameter_name.endswith("mlp.gate.weight"):
                parameter[1::2] = parameter[::2]
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Copy the bundled pair's tokenizer and chat template into a checkpoint."""
    for file in _SOURCE.glob("tokenizer*"):
        shutil.copy(file, folder)
