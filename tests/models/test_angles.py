"""Angles of rotary positions are made as far as paths reach, with the same bits whenever."""

import pytest
import torch

from beamwright.library import library
from beamwright.models.decoder import Angles
from beamwright.models.load import load_model
from beamwright.sections import ModelSettings

HOW = (0.5, 0.25), 1.5, 5000, torch.float32, torch.device("cpu")


def test_they_are_cos_and_sin_of_positions_times_frequencies():
    cos, sin = Angles(*HOW, reached=4).rows(torch.tensor([0, 3]))
    at = torch.tensor([[0.0, 0.0], [1.5, 0.75]])
    assert torch.equal(cos[:, 0], torch.cat([at.cos(), at.cos()], 1) * 1.5)
    assert torch.equal(sin[:, 0], torch.cat([-at.sin(), at.sin()], 1) * 1.5)


def test_bits_do_not_depend_on_what_was_asked_before():
    at_once, by_parts = Angles(*HOW), Angles(*HOW)
    assert at_once.reach(4999)
    assert [by_parts.reach(last) for last in (0, 2047, 2048, 100, 4999)] == [
        *(True, False, True, False, True)
    ]
    assert len(by_parts.cos) == 5000
    assert torch.equal(at_once.cos, by_parts.cos)
    assert torch.equal(at_once.sin, by_parts.sin)


@pytest.mark.skipif(library() is None, reason="built without a C compiler")
def test_a_model_of_the_library_has_those_that_its_paths_reached(gemma):
    decoder = load_model(str(gemma), ModelSettings(model=str(gemma))).decoder
    (far, _), (near, _) = decoder._native._angles
    assert len(far.cos) == len(near.cos) == 0
    decoder._native._turn_by(torch.tensor([7, 2100]))
    assert len(far.cos) == len(near.cos) == 4096 < decoder.shape.context
