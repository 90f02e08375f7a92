"""Tiny random checkpoints of every family, odd ones included."""

from functools import cache

import pytest
from transformers import LlamaConfig, MistralConfig, OPTConfig, Qwen2Config, Qwen3Config

import fakes
from beamwright.models.native import as_groups

TINY = {
    "vocab_size": fakes.VOCAB + 5,  # more rows than the tokenizer has tokens, as in real models
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GATED = {**TINY, "intermediate_size": 96}
SHARED = {**GATED, "num_key_value_heads": 2}
OPT = {**TINY, "ffn_dim": 96, "word_embed_proj_dim": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
ROPE3 = {**YARN, "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"sliding_window": 16, "layer_types": _KINDS}
FAMILIES = {  # config class and options
    "llama-one-kv-head": (LlamaConfig, GATED | {"num_key_value_heads": 1}),
    "llama-odd": (LlamaConfig, SHARED | {"head_dim": 24, "attention_bias": True, "mlp_bias": True,
                                         "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "llama3-rope": (LlamaConfig, SHARED | {"rope_parameters": ROPE3}),
    "llama-linear-rope": (LlamaConfig, GATED | {"rope_parameters": LINEAR}),
    "llama-yarn-rope": (LlamaConfig, GATED | {"rope_parameters": YARN}),
    "mistral": (MistralConfig, SHARED | {"sliding_window": None}),
    "mistral-window": (MistralConfig, SHARED | {"sliding_window": 16}),
    "qwen3-window-in-some": (Qwen3Config, SHARED | SLIDING | {
        "head_dim": 16, "use_sliding_window": True}),
    "qwen2": (Qwen2Config, SHARED | {"tie_word_embeddings": True}),
    "qwen2-yarn": (Qwen2Config, GATED | {"num_key_value_heads": 4, "rope_parameters": YARN}),
    "qwen3": (Qwen3Config, SHARED | {"head_dim": 32}),
    "qwen3-bias-sharded": (Qwen3Config, GATED | {
        "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True}),
    "opt": (OPTConfig, OPT),
    "opt-gelu-no-bias-untied": (OPTConfig, OPT | {
        "enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False}),
}  # fmt: skip
SHARDED = ("llama3-rope", "qwen3-bias-sharded", "opt-gelu-no-bias-untied")


@pytest.fixture(scope="session")
def write_family(tmp_path_factory):
    """Write a family's checkpoint; returns its folder and the `transformers` model."""

    @cache
    def write(name):
        (kind, options), folder = FAMILIES[name], tmp_path_factory.mktemp(name)
        how = {"max_shard_size": "60KB"} if name in SHARDED else {}
        fakes.write_tokenizer(folder)
        return folder, fakes.write_checkpoint(folder, kind(**options), **how)

    return write


@pytest.fixture
def llama_folder(tmp_path):
    """A Llama checkpoint that a test may damage."""
    fakes.write_tokenizer(tmp_path)
    config = LlamaConfig(**fakes.SMALL, num_key_value_heads=2)
    fakes.write_checkpoint(tmp_path, config)
    return tmp_path


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


@pytest.fixture
def unpacked(monkeypatch):
    """Weights as they were read, in groups: packed ones can neither be compared nor counted."""
    monkeypatch.setattr("beamwright.models.native.library", lambda: None)
    monkeypatch.setattr("beamwright.models.load.packer", lambda *_, **how: as_groups)


@pytest.fixture
def few_parts(monkeypatch):
    """Of two parts, so that small sums have several programs, too."""
    monkeypatch.setattr("beamwright.models.streaming._UNITS", 4)
