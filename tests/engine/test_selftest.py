"""What the start-up self-test would find out about a running batch, by breaking it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from beamwright.attention import BACKENDS, check_deterministic, make_attention, tree
from beamwright.engine.selftest import LEAST_CONTEXT, batches_are_exact, kernel_key
from beamwright.errors import InputError
from beamwright.models import decoder as decoder_module
from beamwright.models.decoder import TILE_ROWS, padded_rows
from beamwright.models.dense import DenseDecoder
from beamwright.models.linear import prepack_linear
from beamwright.models.named import shape_from_text
from beamwright.models.weights import random_weights
from engines import exact_dtype, random_decoder

SHAPE = "llama,layers=2,hidden=64,heads=2,kv_heads=1,intermediate=64,vocab=64,context=128"


def decoder_of(context=128, dtype=None):
    """In a dtype in which this machine's products do not depend on the batch."""
    shape = replace(shape_from_text(SHAPE), context=context)
    dtype = getattr(torch, dtype or exact_dtype())
    return DenseDecoder(shape, random_weights(shape, dtype, "cpu", 0, pack=prepack_linear))


@pytest.mark.parametrize("context", [LEAST_CONTEXT, LEAST_CONTEXT + 5, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_decode_behind_tails_of_all_lengths_that_the_context_has_room_for(name, context):
    assert batches_are_exact(decoder_of(context), make_attention(name))


def scaled(found, *, where):
    return [each * (1 + 1e-9 * where(len(each))) for each in found]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("_finish_block", partial(scaled, where=rows.__lt__)) for rows in (8, 24, 100)),
        ("logits", lambda found: found + 1e-5 * len(found)),
    ],
)
def test_rows_that_depend_on_the_batch_are_found_out(monkeypatch, name, change):
    """A library may change kernels, and a row's last bits, at any number of rows."""
    decoder, real = decoder_of(dtype="float64"), getattr(DenseDecoder, name)
    monkeypatch.setattr(DenseDecoder, name, lambda self, *words: change(real(self, *words)))
    assert not batches_are_exact(decoder, make_attention("reference"))


def test_few_rows_are_padded_as_little_as_their_bits_allow(make_solver, monkeypatch):
    """A library that takes another kernel for fewer than 8 rows gets 8."""
    real = DenseDecoder._finish_block
    few = make_solver(attention="reference", dtype="float64")
    fewer = partial(scaled, where=(8).__gt__)
    monkeypatch.setattr(
        DenseDecoder, "_finish_block", lambda self, *words: fewer(real(self, *words))
    )
    eight = make_solver(attention="reference", dtype="float64")
    assert eight.generator.decoder.least_rows == 8
    assert few.exact == eight.exact
    sizes = [[padded_rows(count, least) for count in (1, 2, 3, 5, 8, 9)] for least in (1, 2, 8)]
    assert sizes == [[1, 2, 4, 8, 8, 16], [2, 2, 4, 8, 8, 16], [8, 8, 8, 8, 8, 16]]


def test_sums_that_follow_the_longest_tail_are_found_out(monkeypatch):
    """A library that adds up 64 masked keys in another order than 16."""
    real = tree.attend_few

    def attend_few(query, key, value, mask, softcap=None):
        context, lse = real(query, key, value, mask)
        return context * (1 + 1e-4 * key.shape[2]), lse

    monkeypatch.setattr(tree, "can_attend", lambda *_: False)  # not by our own library
    monkeypatch.setattr(tree, "attend_few", attend_few)
    assert not batches_are_exact(decoder_of(), make_attention("tree"))


def test_every_form_of_products_is_tried_wherever_its_first_layer_is():
    """Files in 4 bits keep some layers' projections in 6."""
    decoder, attention = decoder_of(), make_attention("tree")
    known, last = kernel_key(decoder, attention), decoder.weights.layers[-1]
    plain = type(last.down)

    class FollowsTheBatch(plain):
        def __call__(self, x):
            return super().__call__(x) * (1 + 1e-4 * len(x))

    last.down.__class__ = FollowsTheBatch
    assert kernel_key(decoder, attention) != known
    assert not batches_are_exact(decoder, attention)


# --- --deterministic: tiles of one size, whatever the batch ---------------------------------------


TINY = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=256"


def test_a_library_that_follows_the_batch_is_found_out_and_tiles_defeat_it(monkeypatch):
    """A product whose bits depend on the number of rows, as on a GPU, and on nothing else."""

    def leaky(x, weight, bias=None):
        return (x.unsqueeze(1) * weight).sum(-1) * (1 + 1e-6 * x.shape[0])

    monkeypatch.setattr(decoder_module.F, "linear", leaky)
    attention = make_attention("reference")
    assert not batches_are_exact(random_decoder(TINY, tile_rows=None), attention)
    assert batches_are_exact(random_decoder(TINY, tile_rows=TILE_ROWS), attention)


def test_on_a_gpu_attention_needs_fixed_shapes():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for name in ("tree", "dense"):
        backend = make_attention(name)
        check_deterministic(backend, cpu, torch.float64)
        with pytest.raises(InputError, match=r"--deterministic on cuda: .*--attention reference"):
            check_deterministic(backend, cuda, torch.float64)
    check_deterministic(make_attention("reference"), cuda, torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_tiles_and_kernels_are_exact_on_a_card():
    device = torch.device("cuda")
    decoder = random_decoder(TINY, torch.bfloat16, "cuda", tile_rows=TILE_ROWS)
    for name in ("tree", "dense"):
        backend = make_attention(name, device, torch.bfloat16)
        check_deterministic(backend, device, torch.bfloat16)
        assert batches_are_exact(decoder, backend)
