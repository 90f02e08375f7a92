"""--deterministic: everything but attention runs in tiles of one size, whatever the batch."""

import pytest
import torch

from beamwright.attention import check_deterministic, make_attention
from beamwright.attention.protocols import AttentionView
from beamwright.engine.selftest import batches_are_exact
from beamwright.errors import InputError
from beamwright.models import decoder as decoder_module
from beamwright.models.decoder import TILE_ROWS
from engines import random_decoder

TINY = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=256"


class NoAttention(AttentionView):
    """A view in which every token sees itself only."""

    def attend(self, layer, query, key_value, sinks=None):
        return key_value[:, 1].repeat_interleave(query.shape[1] // key_value.shape[2], dim=1)


def hidden_of(decoder, rows):
    return decoder.hidden(torch.arange(rows) % 200, torch.arange(rows), NoAttention())


@pytest.mark.parametrize("rows", [8, 64, 72, 200])
def test_tiles_are_the_same_function(rows):
    plain, tiled = random_decoder(TINY, tile_rows=None), random_decoder(TINY, tile_rows=TILE_ROWS)
    one, two = hidden_of(plain, rows), hidden_of(tiled, rows)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(plain.logits(one), tiled.logits(two))


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
