"""Hybrids: recurrent layers of `transformers`' modules with states of ours, against its own."""

import json
import shutil
from functools import cache

import pytest
import torch

import fakes
from beamwright import Solver
from beamwright.attention import make_attention
from beamwright.engine.selftest import batches_are_exact
from beamwright.errors import InputError, UnsupportedModelError
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.hf_config import read_shape
from beamwright.models.load import load_model, load_reference_model
from beamwright.sections import ModelSettings
from hybrids import FAMILIES, KeptRows, write_hybrid

STEP = 140
"""Tokens of the prompt; the others are decoded one by one."""


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A tiny checkpoint of a family; written once."""
    return cache(lambda family: write_hybrid(tmp_path_factory.mktemp(family), family))


def load(folder, **settings):
    return load_model(str(folder), ModelSettings(model=str(folder), **settings)).decoder


def tokens(count=200):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, fakes.VOCAB, (count,), generator=generator)


@torch.inference_mode()
def logprobs(decoder, ids, *cuts):
    """Of one row [tokens, vocab], computed in pieces of so many tokens."""
    view, found, at = KeptRows(decoder.shape, decoder.dtype, 1), [], 0
    for count in cuts:
        view.begin([0], [count] if count > 1 else None)
        hidden = decoder.hidden(ids[at : at + count], torch.arange(at, at + count), view)
        found.append(decoder.logits(hidden).log_softmax(-1))
        at += count
    return torch.cat(found)


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probabilities_are_those_of_transformers(write, kind):
    folder, ids = write(kind), tokens()
    with torch.inference_mode():
        reference = load_reference_model(folder, torch.float32).eval()
        expected = reference(ids[None]).logits[0].log_softmax(-1)
    decoder = load(folder)
    assert isinstance(decoder, AdaptedDecoder)
    for cuts in ([200], [64, 7, 61, 68], [STEP, *[1] * (200 - STEP)]):
        found = logprobs(decoder, ids, *cuts)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert decoder.shape.num_parameters == sum(p.numel() for p in reference.parameters())
    assert {each.in_chunks for each in decoder.recurrent} == {kind != "jamba"}


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1", "qwen3_next"])
def test_rows_do_not_depend_on_the_batch(write, kind):
    decoder = load(write(kind), dtype="float32")
    assert batches_are_exact(decoder, make_attention("tree"))
    first = decoder.first_layers().shape
    assert first.layers == {"lfm2": 2, "falcon_h1": 1, "qwen3_next": 4}[kind]
    assert {part.layer for part in first.states} == set(range(first.layers)) - {
        "lfm2": {1},
        "qwen3_next": {3},
    }.get(kind, set())


@pytest.mark.parametrize(
    ("option", "value"),
    [("attention", "dense"), ("schedule", "layerwise"), ("sparse", "asyncspade")],
)
def test_what_knows_no_states_is_refused(write, option, value):
    with pytest.raises(InputError, match=f"--{option}.* --model .*, which has recurrent layers"):
        Solver(model=str(write("lfm2")), verifier="none", **{option: value})


def test_a_hybrid_is_no_verifier(write):
    with pytest.raises(UnsupportedModelError, match="not in verifiers"):
        Solver(model="bundled", verifier=f"likelihood:{write('lfm2')}")


def test_projections_are_quantised_and_gates_are_not(write):
    folder = write("qwen3_5_text")
    decoder = load(folder, weights="int4", dtype="float32")
    module = decoder.recurrent[0].module
    kinds = {
        name: type(getattr(module, name).weight).__name__ for name in ("in_proj_qkv", "conv1d")
    }
    assert kinds == {"in_proj_qkv": "ProjectionWeight", "conv1d": "Parameter"}
    plain = type(module.in_proj_a.weight.linear)
    assert type(module.in_proj_qkv.weight.linear) is not plain
    assert type(module.out_proj.weight.linear) is not plain


def test_the_whole_checkpoint_of_a_model_that_sees_loads(write, tmp_path):
    """As the hub has Qwen3.5: the text part under another name, a vision tower, an MTP block."""
    folder = write("qwen3_5_text")
    others = ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight")

    def change(tensors):
        named = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
        return named | {name: torch.zeros(4, 4) for name in others}

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    fakes.change_tensors(tmp_path, change)
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path, None).states == read_shape(folder, None).states
    ids = tokens(40)
    whole, alone = load(tmp_path, dtype="float32"), load(folder, dtype="float32")
    assert torch.equal(logprobs(whole, ids, 40), logprobs(alone, ids, 40))
