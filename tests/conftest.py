"""Fixtures that several rooms share: one thread, tiny random checkpoints, Triton's interpreter."""

import os
from functools import partial

import pytest
import torch

# Kernels are tested by Triton's interpreter, except where there is a GPU to run them. Triton reads
# this when it is first imported, and `transformers` imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import LlamaConfig

import engines
import fakes

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def generator_folder(tmp_path_factory):
    """A random Llama with an ASCII tokenizer; several ids end a path, so that paths do end."""
    folder = tmp_path_factory.mktemp("generator")
    fakes.write_tokenizer(folder)
    config = LlamaConfig(**{**fakes.SMALL, "eos_token_id": [2, 30, 31]}, num_key_value_heads=2)
    fakes.write_checkpoint(folder, config, seed=3, noise=0.15)
    return folder


@pytest.fixture(scope="session")
def verifier_folder(tmp_path_factory):
    """A random Llama whose tokenizer merges "e" with what follows it, across steps."""
    folder = tmp_path_factory.mktemp("verifier")
    num_tokens = fakes.write_tokenizer(folder, fakes.merges_after_e())
    config = LlamaConfig(**{**fakes.SMALL, "vocab_size": num_tokens}, num_key_value_heads=1)
    fakes.write_checkpoint(folder, config, seed=4, noise=0.1)
    fakes.write_logit_pair_spec(folder)
    return folder


@pytest.fixture
def make_solver(generator_folder):
    """See `engines.tiny_solver`."""
    return partial(engines.tiny_solver, generator_folder)
