"""Tiny checkpoints of hybrids, with random weights."""

from transformers import AutoConfig

import fakes

TINY = {
    **{"vocab_size": fakes.VOCAB, "hidden_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    **{"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 16, "head_dim": 16},
}
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2},
    **{"mamba_expand": 2, "mamba_chunk_size": 16},
}
LAYERS = ["conv", "full_attention", "conv", "full_attention"]
FAMILIES = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": LAYERS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": LAYERS, "num_dense_layers": 1, **EXPERTS},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "granitemoehybrid": {
        **{**MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "shared_intermediate_size": 32},
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
        **{"chunk_size": 16, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
        "head_dim": 16,
    },
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        **{"mamba_dt_rank": 4, "num_experts": 4, "num_experts_per_tok": 2},
    },
}


def write_hybrid(folder, family, **changes):
    """A checkpoint of a family in a folder, which is given back."""
    fakes.write_tokenizer(folder)
    options = {**TINY, **FAMILIES.get(family, {}), **changes}
    fakes.write_checkpoint(folder, AutoConfig.for_model(family, **options))
    return folder
