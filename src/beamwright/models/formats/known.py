"""Which keys of a model's files are read, which change nothing, and what happens to all others.

One table per reader. A key that is in no row is one that this version has never met: it is refused
where it may change results, else named in a remark (`doctor`, and once when the model is loaded).
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from beamwright.errors import UnsupportedModelError


@dataclass(frozen=True)
class KeyTable:
    """What one reader does with each key. Keys are patterns as of a shell: `rope.scaling.*`.

    used: read. harmless: known to change nothing that is computed here. refused: known to change
    results in a way that is not implemented, each with what to do. rest: for all other keys.
    """

    reader: str
    used: tuple[str, ...]
    harmless: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    rest: Literal["refuse", "remark"] = "remark"

    def check(self, keys: Iterable[str], where: str) -> tuple[str, ...]:
        """Remarks on keys that are not known, a line each.

        Raises:
            UnsupportedModelError: for a key that changes results and is not implemented.
        """
        remarks = []
        for key in keys:
            if is_among(key, self.used) or is_among(key, self.harmless):
                continue
            advice = [text for pattern, text in self.refused.items() if fnmatchcase(key, pattern)]
            if advice or self.rest == "refuse":
                way_out = advice[0] if advice else "this version does not know it"
                raise UnsupportedModelError(f"{where}: {self.reader} has {key!r:.80}: {way_out}")
            remarks.append(f"{where}: {self.reader} has {key!r:.80}, which is not read")
        return tuple(remarks)


def is_among(key: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is for this key."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def said(values: Mapping[str, Any]) -> list[str]:
    """Keys that say something, nested ones as `outer.inner`; None, False and `{}` do not."""
    found = []
    for key, value in values.items():
        nested = said(value) if isinstance(value, dict) else [""] * bool(value)
        found += [f"{key}.{inner}" if inner else key for inner in nested]
    return found


# --- tensors ---------------------------------------------------------------------------------

TENSORS = KeyTable(
    "the checkpoint",
    used=(),
    harmless=(
        # Buffers that follow from the config, and are computed.
        "*inv_freq", "*.???_cached", "*.masked_bias", "*.causal_mask", "*position_ids",
        "rope_freqs.weight",
        # Scales of a KV cache, or of attention, in 8 bits: what is kept here is not.
        "*.[qkv]_scale", "*.kv_scale", "*_proj.output_scale", "*.prob_output_scale",
        # Heads that read states: of verifiers, which ask for theirs by name.
        "score.*", "v_head.*", "value_head.*", "reward_head.*", "classifier.*", "regression_*",
        # Layers that guess further tokens.
        "mtp.*", "model.mtp*",
    ),
    rest="refuse",
)  # fmt: skip
"""Names of tensors. What the model itself has is used; see `fit`."""

# --- config.json -----------------------------------------------------------------------------

_ANY = (
    "model_type", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id",
    "transformers_weights", "quantization_config*", "compression_config*",
)  # fmt: skip
_LLAMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "hidden_act", "rope_parameters", "rope_parameters.*", "rope_theta",
    "rope_scaling", "rope_scaling.*", "partial_rotary_factor",
    "original_max_position_embeddings", *_ANY,
)  # fmt: skip
_QWEN = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_USED = {
    "llama": (*_LLAMA, "attention_bias", "mlp_bias"),
    "mistral": (*_LLAMA, "sliding_window"),
    "qwen2": (*_LLAMA, *_QWEN),
    "qwen3": (*_LLAMA, *_QWEN, "attention_bias"),
    "gemma3_text": (
        *_LLAMA, "sliding_window", "layer_types", "attention_bias", "hidden_activation",
        "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
        "use_bidirectional_attention", "sliding_window_pattern", "rope_local_base_freq",
    ),
    "opt": (
        "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
        "vocab_size", "max_position_embeddings", "word_embed_proj_dim", "do_layer_norm_before",
        "_remove_final_layer_norm", "layer_norm_elementwise_affine", "activation_function",
        "enable_bias", *_ANY,
    ),
}  # fmt: skip
HARMLESS = (
    # Of training.
    "initializer_range", "init_std", "*dropout*", "*_pdrop", "layerdrop", "pretraining_tp",
    "gradient_checkpointing", "max_window_layers", "unsloth*", "is_llama_config",
    # Of how it is run, or was written.
    "architectures", "auto_map*", "transformers_version", "_name_or_path", "_commit_hash",
    "transformers.js_config*", "use_cache", "use_bfloat16", "torchscript", "*attn_implementation*",
    "_flash_attn*", "return_dict*", "output_*", "model_max_length", "chunk_size_feed_forward",
    "pruned_heads*", "tokenizer_class", "finetuning_task", "prefix", "is_decoder",
    # Of tokens and their choice, which other files say.
    "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_*",
    "temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams", "num_beam_groups",
    "num_return_sequences", "m??_length", "*_penalty", "early_stopping", "no_repeat_ngram_size",
    "remove_invalid_values", "eos_token_ids", "encoder_no_repeat_ngram_size",
    # Of heads that verifiers read.
    "id2label*", "label2id*", "num_labels", "problem_type", "task_specific_params*",
    "num_nextn_predict_layers",
)  # fmt: skip
CONFIGS = {family: KeyTable("config.json", used, HARMLESS) for family, used in _USED.items()}
"""By family of the own decoder: what the modules of `transformers` read, and nothing else."""

QUANTISATION = KeyTable(
    "quantization_config",
    used=(
        "quant_method", "quant_algo", "bits", "group_size", "desc_act", "version", "format",
        "checkpoint_format", "config_groups.*", "weight_block_size", "load_in_?bit",
    ),
    harmless=(
        # Seen from the tensors.
        "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "lm_head", "sym",
        "dynamic.*", "zero_point", "_load_in_?bit", "bnb_4bit_*", "is_marlin_format", "fmt",
        "scale_fmt", "pack_dtype", "quantization_status", "sparsity_config.*", "store_dtype",
        # Of activations and of the KV cache, which stay in full precision here.
        "activation_scheme", "llm_int8_*", "kv_cache_scheme.*", "kv_cache_quant_algo",
        # Of how it was made, or is run.
        "damp*", "static_groups", "true_sequential", "model_*", "block_name_to_quantize",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse*",
        "batch_size", "tokenizer", "dataset", "pad_token_id", "cache_block_outputs", "meta.*",
        "*exllama*", "max_input_length", "use_cuda_fp16", "backend", "do_fuse", "fuse_*",
        "global_compression_ratio", "producer.*", "quantization_version", "dequantize",
        "hf_quant_config_version",
    ),
    refused=dict.fromkeys(
        ("transform_config*", "*rotation*"), "rotations of activations are not computed here"
    ),
)  # fmt: skip

# --- GGUF ----------------------------------------------------------------------------------------

_OF_EVERY_MODEL = (
    "context_length", "block_count", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
)  # fmt: skip
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern")
_OF_MODELS = {
    "llama": ("attention.sliding_window",),
    "qwen2": (),
    "qwen3": (),
    "qwen2moe": (*_EXPERTS, "expert_shared_feed_forward_length"),
    "qwen3moe": _EXPERTS,
    "gemma": (),
    "gemma2": (*_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": (*_WINDOW, "final_logit_softcapping", "rope.freq_base_swa"),
}
# The vocabulary's size is the embedding's. The last two are read by no engine for these models.
_HARMLESS = (
    "vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "rope.scaling.yarn_ext_factor",
)  # fmt: skip
_FOLDER = "take the Hugging Face folder of this model"
_REFUSED = {
    "expert_*": f"a mixture of experts (Mixtral, or a merge of such) is not read so: {_FOLDER}",
    "pooling_type": "a model of embeddings or a reranker writes no text",
    "classifier.*": "a model of embeddings or a reranker writes no text",
    "vision.*": "an image model in one file, as Ollama's are: take a file of its text part",
    "mm.*": "an image model in one file, as Ollama's are: take a file of its text part",
    "*": f"this version does not know it: {_FOLDER}, or a newer Beamwright",
}
GGUF = {
    model: KeyTable(
        "GGUF header",
        used=tuple(f"{model}.{key}" for key in (*_OF_EVERY_MODEL, *more)),
        harmless=tuple(f"{model}.{key}" for key in _HARMLESS),
        refused={f"{model}.{key}": why for key, why in _REFUSED.items()},
        rest="refuse",
    )
    for model, more in _OF_MODELS.items()
}
"""By architecture, of keys that begin with its name and whose values say something."""
ENDING = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
GGUF_FILE = KeyTable(
    "GGUF header",
    used=(
        "general.architecture", "general.type", "general.alignment", "split.count",
        *(f"tokenizer.ggml.{name}" for name in (
            "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token",
            "add_space_prefix",
        )),
        *(f"tokenizer.ggml.{role}_token_id" for role in ("bos", "unknown", "padding", *ENDING)),
        "tokenizer.chat_template", "tokenizer.chat_template.*",
    ),
    # What it is, who made it and how; how tokens are drawn is said by options alone. Prompts are
    # never ended (add_eos_token).
    harmless=(
        *(f"general.{name}" for name in (
            "name", "basename", "finetune", "author", "version", "organization", "description",
            "quantized_by", "size_label", "license*", "url", "doi", "uuid", "repo_url", "source.*",
            "base_model.*", "dataset.*", "datasets", "tags", "languages", "quantization_version",
            "file_type", "parameter_count", "sampling.*", "tensor_extra.*",
        )),
        "quantize.*", "split.*", "imatrix.*", "mradermacher.*", "tokenizer.chat_templates",
        *(f"tokenizer.ggml.{name}" for name in (
            "add_eos_token", "add_sep_token", "seperator_token_id", "mask_token_id", "cls_token_id",
            "fim_*_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
            "remove_extra_whitespaces", "token_type_count",
        )),
        "tokenizer.huggingface.json",
    ),
    refused={"tokenizer.ggml.suppress_tokens": f"tokens that are never drawn: {_FOLDER}"},
)  # fmt: skip

# --- tokenizers and chat templates ---------------------------------------------------------------

TOKENIZER_CONFIG = KeyTable(
    "tokenizer_config.json",
    used=(
        "*_token", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens",
        "chat_template", "fix_mistral_regex", "auto_map",
    ),
    # What of these decides ids is in tokenizer.json; `transformers` reads them where there is none.
    harmless=(
        "_*", "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_file", "backend",
        "clean_up_tokenization_spaces*", "device_map", "do_lower_case", "errors", "from_slow",
        "init_inputs", "is_local", "keep_accents", "legacy", "local_files_only", "max_length",
        "merges_file", "model_input_names", "model_max_length", "name_or_path", "pad_*", "padding*",
        "processor_class", "remove_space", "response_schema", "sp_model_kwargs",
        "spaces_between_special_tokens", "special_tokens_map_file", "strip_accents", "stride",
        "tokenize_chinese_chars", "tokenizer_*", "trim_offsets", "truncation*", "unk_id",
        "use_default_system_prompt", "use_fast", "verbose", "vocab_file",
    ),
)  # fmt: skip
TOKENIZER = KeyTable(
    "tokenizer.json",  # `tokenizers` reads it, and refuses what it does not know
    used=(
        "version",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    ),
    harmless=("truncation", "padding"),
    rest="refuse",
)
CHAT_TEMPLATE = KeyTable(
    "chat template",  # names that it reads; all others are what --template-args may give
    used=("messages", "tools", "documents", "add_generation_prompt", "*_token", "strftime_now"),
)
GENERATION = KeyTable(
    "generation_config.json",
    used=("eos_token_id",),
    # How tokens are drawn is said by options alone.
    harmless=(
        "_*", "assistant_*", "bos_token_id", "cache_*", "decoder_start_token_id", "do_sample",
        "is_assistant", "max_length", "max_new_tokens", "min_p", "num_assistant_tokens*",
        "num_beams", "num_return_sequences", "output_*", "pad_token_id", "return_dict_in_generate",
        "temperature", "top_k", "top_p", "transformers_version", "trust_remote_code", "use_cache",
    ),
)  # fmt: skip
TABLES: tuple[KeyTable, ...] = (
    *(TENSORS, *CONFIGS.values(), QUANTISATION, TOKENIZER_CONFIG, TOKENIZER, CHAT_TEMPLATE),
    *(GENERATION, *GGUF.values(), GGUF_FILE),
)
"""Of every reader."""
