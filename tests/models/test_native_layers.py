"""Whole layers by the library: like torch's operations, in the same bits however they are run."""

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.engine.selftest import _OwnTokenOnly
from beamwright.kv.segments import PathPart
from beamwright.library import library
from beamwright.models import native
from beamwright.models.decoder import RotaryTables
from beamwright.models.prefill import PrefillRequest
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from engines import random_decoder

pytestmark = pytest.mark.skipif(library() is None, reason="built without a C compiler")
SHAPES = {
    "llama": "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=96,vocab=96,context=256",
    "qwen3": "qwen3,layers=2,hidden=96,heads=6,kv_heads=2,intermediate=96,vocab=96,context=256",
    "qwen2": "qwen2,layers=2,hidden=64,heads=4,kv_heads=1,intermediate=96,vocab=96,context=256",
}


def in_blocks(text, dtype=torch.float32):
    """A decoder whose projections are rounded to blocks of 8 bits."""
    return random_decoder(
        text, dtype, pack=lambda each: native.pack_for_library(native.round_to_q8_0(each))
    )


def begun(decoder, rows, tokens=4):
    """A session of rows behind one prompt."""
    model = TreeModel(decoder, make_attention("tree"), 1 << 24)
    root = model.store.create()
    model.prefill([PrefillRequest((), root, range(1, 20), 0, read=())])
    session = DecodeSession(decoder, model.store, model.backend)
    paths = [(PathPart(root, 19 - row % 2),) for row in range(rows)]
    session.arrange_rows([], paths, [model.store.create() for _ in range(rows)])
    session.prepare(tokens)
    return session


def decoded(decoder, rows=5, tokens=4, described=True):
    """Their hidden states, token by token."""
    session = begun(decoder, rows, tokens)
    if not described:
        session._view.describe_layers = lambda: None
    found = []
    for token in range(tokens):
        ids = torch.arange(rows) * 3 + token
        padded = torch.cat([ids, ids[:1].expand(session.num_rows - rows)])
        places = torch.full_like(padded, 19 + token)
        found.append(session.compute(padded, places)[:rows].clone())
        session.advance()
    return torch.stack(found)


@pytest.mark.parametrize("named", SHAPES)
@torch.inference_mode()
def test_is_what_torchs_operations_give(named):
    decoder = in_blocks(SHAPES[named])
    assert decoder._native is not None
    found = decoded(decoder)
    decoder._native = None
    torch.testing.assert_close(found, decoded(decoder), rtol=0.02, atol=0.02)
    middle = (found - decoded(decoder)).abs().median()
    assert middle < 1e-4  # but where an activation is rounded to another of the 8 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("named", SHAPES)
@torch.inference_mode()
def test_has_the_same_bits_by_layers_instruction_sets_threads_and_batches(
    named, dtype, monkeypatch
):
    decoder = in_blocks(SHAPES[named], dtype)
    found = decoded(decoder)
    assert torch.equal(found, decoded(decoder, described=False))
    assert torch.equal(found[:, :2], decoded(decoder, rows=2))
    for number in range(library().bw_best() + 1):
        monkeypatch.setattr(library(), "bw_best", lambda number=number: number)
        assert torch.equal(found, decoded(decoder))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(found, decoded(decoder))


@torch.inference_mode()
def test_tokens_that_are_written_to_other_rows_have_the_same_bits():
    """As a draft's are."""
    decoder = in_blocks(SHAPES["llama"])
    session, one_by_one = begun(decoder, 3), decoded(decoder, 3, 3)
    given = [(2, 0, 6, 19), (2, 1, 7, 20), (0, 0, 0, 19)]  # row, ahead, id, position
    found = session.forward_some(given, [(2, 0, 0), (0, 2, 0), (1, 2, 1), (2, 1, 0)])
    expected = [one_by_one[0, 2], one_by_one[1, 2], one_by_one[0, 0]]
    assert torch.equal(found[:3], torch.stack(expected))
    session.advance({0: 1, 1: 1, 2: 2})
    session.prepare(1)
    assert torch.equal(session.forward_some([(2, 0, 8, 21)], [(0, 2, 0)])[0], one_by_one[2, 2])


@torch.inference_mode()
def test_many_rows_are_opened_in_parts():
    decoder = in_blocks(SHAPES["llama"])
    tokens = torch.arange(1100) % 96
    whole = decoder.hidden(tokens, tokens, _OwnTokenOnly())
    read = torch.tensor([3, 600, 1099, 3, 3, 3, 3, 3])
    some = decoder.hidden(tokens, tokens, _OwnTokenOnly(), read)
    alone = decoder.hidden(tokens[600:601], tokens[600:601], _OwnTokenOnly())
    assert torch.equal(some, whole[read])
    assert torch.equal(alone[0], whole[600])


# --- rotary tables grow as far as paths reach -------------------------------------------------

HOW = (0.5, 0.25), 1.5, 5000, torch.float32, torch.device("cpu")


def test_bits_do_not_depend_on_what_was_asked_before():
    at_once, by_parts = RotaryTables(*HOW), RotaryTables(*HOW)
    assert at_once.extend_to(4999)
    assert [by_parts.extend_to(last) for last in (0, 2047, 2048, 100, 4999)] == [
        *(True, False, True, False, True)
    ]
    assert len(by_parts.cos) == 5000
    assert torch.equal(at_once.cos, by_parts.cos)
    assert torch.equal(at_once.sin, by_parts.sin)
