"""Models whose layers see windows: their searches take less memory, and some options say no."""

import pytest
from transformers import MistralConfig

import fakes
from beamwright.errors import InputError
from engines import WINDOWS, grow, tiny_solver

LONG = {"search": "dvts", "n": 12, "width": 2, "max_rounds": 12, "max_tokens": 180}
LONG |= {"max_step_tokens": 20, "ignore_eos": True, "schedule": "in-gpu"}


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint whose layers all see so many tokens; None: all of them."""

    def checkpoint(window):
        folder = tmp_path / str(window)
        config = MistralConfig(**{**WINDOWS, "sliding_window": window, "num_hidden_layers": 2})
        fakes.write_tokenizer(folder)
        fakes.write_checkpoint(folder, config)
        return folder

    return checkpoint


def test_windows_save_memory(write):
    """Without, the same model holds all of every path in all layers."""
    peaks = [grow(tiny_solver(write(size), **LONG))[0].kv.device_peak_bytes for size in (16, None)]
    assert peaks[0] < 0.45 * peaks[1]


@pytest.mark.parametrize("changes", [{"schedule": "layerwise"}, {"sparse": "quest"}])
def test_what_does_not_know_windows_says_so(write, changes):
    with pytest.raises(InputError, match="windows"):
        tiny_solver(write(16), host_memory="8MiB", **changes)
