"""What the start-up self-test would find out about a running batch, by breaking it."""

from dataclasses import replace

import pytest
import torch

from beamwright.attention import BACKENDS, make_attention, tree
from beamwright.engine.selftest import LEAST_CONTEXT, batches_are_exact, kind
from beamwright.models.dense import DenseDecoder
from beamwright.models.linear import prepack
from beamwright.models.named import shape_from_text
from engines import exact_dtype, random_decoder

SHAPE = "llama,layers=2,hidden=64,heads=2,kv_heads=1,intermediate=64,vocab=64,context=128"


def decoder_of(context=128):
    """In a dtype in which this machine's products do not depend on the batch."""
    shape = replace(shape_from_text(SHAPE), context=context)
    dtype = getattr(torch, exact_dtype())
    return random_decoder(shape, dtype, pack=prepack)


@pytest.mark.parametrize("context", [LEAST_CONTEXT, LEAST_CONTEXT + 5, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_decode_behind_tails_of_all_lengths_that_the_context_has_room_for(name, context):
    assert batches_are_exact(decoder_of(context), make_attention(name))


def test_sums_that_follow_the_longest_tail_are_found_out(monkeypatch):
    """A library that adds up 64 masked keys in another order than 16."""
    real = tree.attend_few

    def attend_few(query, key, value, mask, softcap=None):
        context, lse = real(query, key, value, mask)
        return context * (1 + 1e-4 * key.shape[2]), lse

    monkeypatch.setattr(tree, "attends", lambda *_: False)  # not by our own library
    monkeypatch.setattr(tree, "attend_few", attend_few)
    assert not batches_are_exact(decoder_of(), make_attention("tree"))


def test_every_form_of_products_is_tried_wherever_its_first_layer_is():
    """Files in 4 bits keep some layers' projections in 6."""
    decoder, attention = decoder_of(), make_attention("tree")
    known, last = kind(decoder, attention), decoder.weights.layers[-1]
    plain = type(last.down)

    class FollowsTheBatch(plain):
        def __call__(self, x):
            return super().__call__(x) * (1 + 1e-4 * len(x))

    last.down.__class__ = FollowsTheBatch
    assert kind(decoder, attention) != known
    assert not batches_are_exact(decoder, attention)


def test_models_of_one_kind_are_asked_about_once():
    tree, dense = make_attention("tree"), make_attention("dense")
    one, other = decoder_of(), decoder_of()
    assert kind(one, tree) == kind(other, make_attention("tree"))
    tiled = DenseDecoder(one.shape, one.weights, 64)
    unlike = [(one, tree), (decoder_of(context=64), tree), (tiled, tree), (one, dense)]
    if one.dtype == torch.float32:
        unlike.append((random_decoder(one.shape), tree))
    assert len({kind(*pair) for pair in unlike}) == len(unlike)
