"""Tiny random checkpoints of every family, odd ones included."""

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
SLIDING = "sliding_attention"
GATED = {**TINY, "intermediate_size": 96}
OPT = {**TINY, "ffn_dim": 96, "word_embed_proj_dim": 64}
ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name: (config class, its options, how save_pretrained writes it)
FAMILIES = {
    "llama-one-kv-head": (LlamaConfig, {**GATED, "num_key_value_heads": 1}, {}),
    "llama-odd": (
        LlamaConfig,
        {
            **{**GATED, "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True},
            **{"mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
        },
        {},
    ),
    "llama3-rope": (
        LlamaConfig,
        {**GATED, "num_key_value_heads": 2, "rope_parameters": ROPE3},
        {"max_shard_size": "60KB"},
    ),
    "llama-linear-rope": (
        LlamaConfig,
        {**GATED, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {},
    ),
    "llama-yarn-rope": (LlamaConfig, {**GATED, "rope_parameters": YARN}, {}),
    "mistral": (MistralConfig, {**GATED, "num_key_value_heads": 2, "sliding_window": None}, {}),
    "mistral-window": (
        MistralConfig,
        {**GATED, "num_key_value_heads": 2, "sliding_window": 16},
        {},
    ),
    "qwen3-window-in-some": (
        Qwen3Config,
        {
            **{**GATED, "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": True},
            **{"sliding_window": 16, "layer_types": [SLIDING, "full_attention", SLIDING]},
        },
        {},
    ),
    "qwen2": (Qwen2Config, {**GATED, "num_key_value_heads": 2, "tie_word_embeddings": True}, {}),
    "qwen2-yarn": (Qwen2Config, {**GATED, "num_key_value_heads": 4, "rope_parameters": YARN}, {}),
    "qwen3": (Qwen3Config, {**GATED, "num_key_value_heads": 2, "head_dim": 32}, {}),
    "qwen3-bias-sharded": (
        Qwen3Config,
        {**GATED, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True},
        {"max_shard_size": "60KB"},
    ),
    "opt": (OPTConfig, OPT, {}),
    "opt-gelu-no-bias-untied": (
        OPTConfig,
        {**OPT, "enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False},
        {"max_shard_size": "60KB"},
    ),
}


@pytest.fixture(scope="session")
def write_family(tmp_path_factory):
    """Write a family's checkpoint; returns its folder and the `transformers` model."""
    written = {}

    def write(name):
        if name not in written:
            kind, options, save_options = FAMILIES[name]
            folder = tmp_path_factory.mktemp(name)
            fakes.write_tokenizer(folder)
            model = fakes.write_checkpoint(folder, kind(**options), **save_options)
            written[name] = (folder, model)
        return written[name]

    return write


@pytest.fixture
def llama_folder(tmp_path):
    """A Llama checkpoint that a test may damage."""
    fakes.write_tokenizer(tmp_path)
    config = LlamaConfig(**fakes.SMALL, num_key_value_heads=2)
    fakes.write_checkpoint(tmp_path, config)
    return tmp_path


@pytest.fixture
def sharded_folder(tmp_path):
    """The same in several shards."""
    fakes.write_tokenizer(tmp_path)
    config = LlamaConfig(**fakes.SMALL, num_key_value_heads=2)
    fakes.write_checkpoint(tmp_path, config, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
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
