"""The peers benchmark's own sides, on small models; the peers themselves are not installed here."""

from argparse import Namespace
from pathlib import Path

import pytest

from beamwright.models.shape import ModelShape, shape_from_text
from beamwright_lab.common import decode_flops
from beamwright_lab.peers import models
from beamwright_lab.peers.models import model_folder
from beamwright_lab.peers.paths import PathSides, path_flops


def test_beamwright_writes_n_paths_of_one_length_from_the_prompt_that_the_others_get():
    args = Namespace(tokens=4, temperature=0.8, prompt_tokens=16)
    sides = PathSides(args, model_folder("bundled"), 2, "float32")
    assert sides.kv_bytes["beamwright"] > 0
    assert len(sides.prompt) == args.prompt_tokens


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `qwen2.5-0.5b` is, with fewer and smaller layers and fewer words."""
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_LARGE_SIZES", sizes)
        models._write_large(folder)
    return folder


def test_flops_of_one_prompt_and_its_paths():
    shape: ModelShape = shape_from_text("qwen2.5-0.5b")
    whole = path_flops(shape, n=4, num_prompt=1, num_new=3)
    # The prompt's one token has logits, too, so every forwarded token costs the same.
    assert whole == decode_flops(shape, 1 + 4 * 2, 1 + 4 * (2 + 3))
