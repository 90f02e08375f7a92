"""Hybrids: recurrent layers of `transformers`' modules with states of ours, against its own."""

import json

import pytest
import torch

import fakes
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.load import load_model, read_reference
from beamwright.sections import ModelSettings
from hybrids import FAMILIES, write_hybrid
from kept_states import KeptRows

STEP = 140
"""Tokens of the prompt; the others are decoded one by one."""


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A tiny checkpoint of a family; written once."""
    written = {}

    def call(family, **changes):
        key = family, json.dumps(changes)
        if key not in written:
            written[key] = write_hybrid(tmp_path_factory.mktemp(family), family, **changes)
        return written[key]

    return call


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
        reference = read_reference(folder, torch.float32).eval()
        expected = reference(ids[None]).logits[0].log_softmax(-1)
    decoder = load(folder)
    assert isinstance(decoder, AdaptedDecoder)
    for cuts in ([200], [64, 7, 61, 68], [STEP, *[1] * (200 - STEP)]):
        found = logprobs(decoder, ids, *cuts)
        # Nemotron-H clamps its time steps where it gets several tokens, and not of one.
        most = 2e-2 if kind == "nemotron_h" and 1 in cuts else 1e-5
        torch.testing.assert_close(found, expected, atol=most, rtol=0)
    assert decoder.shape.num_parameters == sum(p.numel() for p in reference.parameters())
    assert {each.in_chunks for each in decoder.recurrent} == {kind != "jamba"}
