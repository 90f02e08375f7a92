"""What the start-up self-test would find out about a running batch, by breaking it."""

from dataclasses import replace

import pytest
import torch

from beamwright.attention import BACKENDS, make_attention, tree
from beamwright.engine import selftest
from beamwright.engine.selftest import LEAST_CONTEXT, batches_are_exact
from beamwright.kv.tails import RowTails
from beamwright.models.decoder import Decoder
from beamwright.models.linear import prepack
from beamwright.models.session import DecodeSession
from beamwright.models.shape import shape_from_text
from beamwright.models.weights import random_weights
from engines import exact_dtype

SHAPE = "llama,layers=2,hidden=64,heads=2,kv_heads=1,intermediate=64,vocab=64,context=128"


def decoder_of(context=128):
    """In a dtype in which this machine's products do not depend on the batch."""
    shape = replace(shape_from_text(SHAPE), context=context)
    dtype = getattr(torch, exact_dtype())
    return Decoder(shape, random_weights(shape, dtype, "cpu", 0, pack=prepack))


@pytest.fixture
def arranged(monkeypatch):
    """(rows that stay, tail lengths of those that join) whenever a batch changes."""
    found, real = [], DecodeSession.arrange

    def arrange(self, kept, paths=(), segments=()):
        found.append((len(kept), [segment.length for segment in segments]))
        real(self, kept, paths, segments)

    monkeypatch.setattr(DecodeSession, "arrange", arrange)
    return found


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_join_and_leave_with_tails_of_their_own(arranged, name):
    assert batches_are_exact(decoder_of(), make_attention(name))
    joined = [lengths for staying, lengths in arranged if staying and lengths]
    assert joined
    assert {length for lengths in joined for length in lengths} == set(selftest._DECODED)
    assert any(staying and not lengths for staying, lengths in arranged), "others leave"


@pytest.mark.parametrize("context", [LEAST_CONTEXT, LEAST_CONTEXT + 5])
def test_a_short_context_has_short_tails(arranged, context):
    assert batches_are_exact(decoder_of(context), make_attention("tree"))
    lengths = {length for _, lengths in arranged for length in lengths}
    assert lengths == {0, context - LEAST_CONTEXT}


def test_sums_that_follow_the_longest_tail_are_found_out(monkeypatch):
    """A library that adds up 64 masked keys in another order than 16."""
    real = tree.attend_few

    def attend_few(query, key, value, mask):
        context, lse = real(query, key, value, mask)
        return context * (1 + 1e-4 * key.shape[2]), lse

    monkeypatch.setattr(tree, "attend_few", attend_few)
    assert not batches_are_exact(decoder_of(), make_attention("tree"))


def test_a_tail_that_is_lost_when_others_join_is_found_out(monkeypatch):
    real = RowTails.arrange

    def arrange(self, kept, num_rows):
        real(self, kept, num_rows)
        if num_rows > len(kept) > 0:
            self.storage[..., 0, :] = 0

    monkeypatch.setattr(RowTails, "arrange", arrange)
    assert not batches_are_exact(decoder_of(), make_attention("tree"))


def test_models_of_one_kind_are_asked_about_once():
    tree, dense = make_attention("tree"), make_attention("dense")
    one, other = decoder_of(), decoder_of()
    longer = decoder_of(context=64)
    tiled = Decoder(one.shape, one.weights, 64)
    plain = Decoder(one.shape, random_weights(one.shape, one.dtype, "cpu", 0))
    assert selftest.unlike([one, other], [tree, make_attention("tree")]) == [(one, tree)]
    given = [one, longer, tiled, one, *([plain] if one.dtype == torch.float32 else [])]
    backends = [tree, tree, tree, dense, tree][: len(given)]
    assert selftest.unlike(given, backends) == list(zip(given, backends, strict=True))
