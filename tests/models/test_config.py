import json
from pathlib import Path

import pytest
from transformers import MistralConfig, Qwen2Config

from beamwright.errors import UnsupportedModelError
from beamwright.io import read_yaml
from beamwright.models.hf_config import read_shape

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
REFUSED = read_yaml(Path(__file__).with_suffix(".yaml"), "tests")


@pytest.fixture
def inspect(tmp_path):
    def call(config, context=None, decoder="auto"):
        if isinstance(config, dict):
            (tmp_path / "config.json").write_text(json.dumps(config))
        else:
            config.save_pretrained(tmp_path)
        return read_shape(tmp_path, context, decoder=decoder)

    return call


@pytest.mark.parametrize("complaint", REFUSED)
def test_what_the_own_decoder_cannot_do_is_one_line_that_lists_what_it_can(
    inspect, complaint, tmp_path
):
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        inspect(TINY | REFUSED[complaint], decoder="own")
    message = str(caught.value)
    assert "\n" not in message
    for supported in ("supported: opt, llama, mistral, qwen2, qwen3, gemma3_text", "llama3"):
        assert supported in message
    way = "--model openai:URL#NAME"
    if "config cannot be read" not in message:
        assert way in message
    with pytest.raises(UnsupportedModelError) as caught:  # which nobody else can run for us
        read_shape(tmp_path, None, "verifier", "own")
    assert way not in str(caught.value)


def test_a_sliding_window_that_cannot_matter_is_left_out(inspect):
    mistral = MistralConfig(**TINY, sliding_window=64, max_position_embeddings=256)
    assert [inspect(mistral, count).context for count in (64, 1000)] == [64, 256]
    assert inspect(mistral, context=64).groups == ()
    wide = MistralConfig(**TINY, sliding_window=256, max_position_embeddings=256)
    assert (inspect(wide).context, inspect(wide).groups) == (256, ())
    unused = Qwen2Config(**TINY, sliding_window=64, use_sliding_window=False)
    assert (inspect(unused).architecture, inspect(unused).groups) == ("qwen2", ())


def test_layers_with_a_window_are_a_group(inspect):
    mistral = MistralConfig(**TINY, sliding_window=64, max_position_embeddings=256)
    (group,) = inspect(mistral).groups
    layers = tuple(range(TINY["num_hidden_layers"]))
    assert (group.layers, group.window, group.kv_heads) == (layers, 64, 2)
    assert group.head_dim == TINY["hidden_size"] // TINY["num_attention_heads"]
    options = {**TINY, "num_hidden_layers": 3, "max_position_embeddings": 256}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = Qwen2Config(**options, use_sliding_window=True, sliding_window=64, layer_types=kinds)
    full, sliding = inspect(mixed).groups
    assert (full.layers, full.window) == ((1,), None)
    assert (sliding.layers, sliding.window) == ((0, 2), 64)
