"""The peers benchmark's own sides, on the bundled model."""

from argparse import Namespace

from benchmarks.peers.models import model_folder
from benchmarks.peers.paths import PathSides


def test_beamwright_writes_n_paths_of_one_length_from_the_prompt_that_the_others_get():
    args = Namespace(tokens=4, temperature=0.8, prompt_tokens=16)
    sides = PathSides(args, model_folder("bundled"), 2)
    assert sides.kv_bytes["beamwright"] > 0
    assert len(sides.prompt) == args.prompt_tokens
