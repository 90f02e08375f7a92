"""The most memory that loading a checkpoint takes, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

import fakes
from beamwright.models.hf_config import read_shape
from beamwright.plan.costs import Storage, weight_bytes

LAYERS = 16
STATUS = Path("/proc/self/status")
LOAD = """
import json, sys
from pathlib import Path
from beamwright.sections import ModelSettings
from beamwright.models.load import load_model

def bytes_of(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

small, large, weights, dtype = sys.argv[1:]
settings = ModelSettings(weights=weights, dtype=dtype)
load_model(small, settings)  # whatever a first model needs, libraries included
before = bytes_of("VmHWM"), bytes_of("VmRSS")
model = load_model(large, settings)
print(json.dumps([*before, bytes_of("VmHWM"), bytes_of("VmRSS")]))
"""

SOLVE = """
import json, sys
from pathlib import Path
from beamwright import Solver

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small, large, memory = sys.argv[1:]
options = {"verifier": "logprob", "n": 2, "width": 2, "max_rounds": 2, "max_step_tokens": 8}
options |= {"dtype": "float32", "kv_memory": "8MiB"}
Solver(model=small, **options).solve("1")  # whatever a first search needs
before = peak()
with Solver(model=large, **options, memory=int(memory)) as solver:
    found = solver.solve("1")
    moved = solver._machinery.sizes[0].with_offloaded(16)
kept = {name: vars(each) for name, each in found.weights.items()}
print(json.dumps([peak() - before, found.tree_hash, moved.weights, kept]))
"""


def write(folder, **sizes):
    folder.mkdir()
    fakes.wrap(fakes.byte_level_bpe([])).save_pretrained(folder)
    config = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 1, **sizes}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 256}
    fakes.write_checkpoint(folder, Qwen2Config(**config, **heads, dtype="bfloat16"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model with one layer, and with sixteen, 57 MB in bfloat16."""
    place = tmp_path_factory.mktemp("models")
    return [
        write(place / str(layers), vocab_size=512, num_hidden_layers=layers)
        for layers in (1, LAYERS)
    ]


def run(script, *words):
    """What a script prints in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def loaded(small, large, weights, dtype):
    """Bytes before, at most and resident, and then the same afterwards."""
    return run(LOAD, small, large, weights, dtype)


tells_peak = pytest.mark.skipif(
    not STATUS.exists() or "VmHWM" not in STATUS.read_text(), reason="the system tells no peak"
)


@pytest.mark.nightly
@tells_peak
@pytest.mark.parametrize(
    ("weights", "dtype"), [("auto", "bfloat16"), ("auto", "float32"), ("int8", "bfloat16")]
)
def test_loading_holds_the_weights_and_copies_of_one_layer(folders, weights, dtype):
    before, _, peak, _ = loaded(*folders, weights, dtype)
    shape = read_shape(folders[1], None)
    element_bytes = getattr(torch, dtype).itemsize
    storage = Storage.INT8 if weights == "int8" else Storage.PLAIN
    kept = weight_bytes(shape, element_bytes, storage)
    in_float32 = weight_bytes(shape, 4) // LAYERS
    assert peak - before <= kept + 3 * in_float32


@pytest.mark.nightly
@tells_peak
def test_a_tied_table_is_held_once(folders, tmp_path):
    """As the LM head; rows of the embedding are read from the file."""
    vocab, hidden = 120_000, 384
    large = write(tmp_path / "large", vocab_size=vocab, tie_word_embeddings=True)
    _, before, _, after = loaded(folders[0], large, "auto", "bfloat16")
    assert after - before <= 1.3 * 2 * vocab * hidden


@pytest.mark.nightly
@tells_peak
def test_layers_on_disk_take_no_memory(folders):
    """But for two buffers, while the model is loaded and while it runs."""
    whole, expected, least, _ = run(SOLVE, *folders, 2**30)
    peak, tree_hash, _, weights = run(SOLVE, *folders, least + 9 * 2**20)
    assert tree_hash == expected
    moved = weights["generator"]
    assert moved["layers"] > LAYERS // 2
    saved = weight_bytes(read_shape(folders[1], None), 4) - moved["device_bytes"]
    assert whole - peak > 0.7 * saved
    assert saved > 40 * 2**20
