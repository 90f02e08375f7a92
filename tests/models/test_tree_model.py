"""Prefill computes hidden states of the tokens that are read, and KV of all."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.engine.selftest import _OwnTokenOnly
from beamwright.errors import CapacityError, DeviceMemoryError
from beamwright.kv.segments import PathPart
from beamwright.models import dense
from beamwright.models.linear import prepack_linear
from beamwright.models.named import shape_from_text
from beamwright.models.prefill import PrefillRequest
from beamwright.models.shape import LayerGroup
from beamwright.models.tree_model import TreeModel
from engines import random_decoder

SHAPE = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=192,vocab=128,context=256"
READS = [(0, 11, 12), (), (38,), (3, 30)]
LENGTHS = (13, 5, 39, 31)


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(SHAPE, pack=prepack_linear)


def prefilled(decoder, backend, chunk_tokens, reads):
    """Hidden states and KV of steps behind one prompt."""
    model = TreeModel(decoder, make_attention(backend), 1 << 24, chunk_tokens)
    root = model.store.create()
    model.prefill([PrefillRequest((), root, range(1, 20), 0, read=())])
    path = (PathPart(root, 19),)
    requests = [
        PrefillRequest(path, model.store.create(), range(10, 10 + length), 19, read)
        for length, read in zip(LENGTHS, reads, strict=True)
    ]
    hidden = model.prefill(requests)
    return hidden, [model.store.gather(r.segment, r.segment.length) for r in requests]


@pytest.mark.parametrize("backend", ["tree", "dense", "reference"])
@pytest.mark.parametrize("chunk_tokens", [256, 12])
@torch.inference_mode()
def test_what_is_not_read_changes_no_bit_of_what_is(decoder, backend, chunk_tokens):
    whole, kv = prefilled(decoder, backend, chunk_tokens, [None] * 4)
    some, same_kv = prefilled(decoder, backend, chunk_tokens, READS)
    for every, found, read in zip(whole, some, READS, strict=True):
        assert torch.equal(found, every[list(read)])
    assert all(map(torch.equal, kv, same_kv))


@torch.inference_mode()
def test_an_mlp_of_many_rows_is_computed_in_parts_with_the_same_bits(decoder, monkeypatch):
    tokens = torch.arange(48)
    whole = decoder.hidden(tokens, tokens, _OwnTokenOnly())
    monkeypatch.setattr(dense, "_INNER_ROWS", 16)
    assert torch.equal(decoder.hidden(tokens, tokens, _OwnTokenOnly()), whole)


@pytest.mark.parametrize("backend", ["tree", "dense"])
@torch.inference_mode()
def test_a_step_without_room_leaves_no_working_copies(decoder, backend):
    token_bytes = decoder.shape.kv_bytes_per_token(4)
    model = TreeModel(decoder, make_attention(backend), 32 * token_bytes)
    root, step = model.store.create(), model.store.create()
    model.prefill([PrefillRequest((), root, range(1, 20), 0)])
    with pytest.raises(CapacityError):
        model.prefill([PrefillRequest((PathPart(root, 19),), step, range(1, 40), 19)])
    assert model.store.scratch.used_bytes == 0
    assert not step.copies


@torch.inference_mode()
def test_steps_that_cannot_be_computed_hold_no_blocks(decoder, monkeypatch):
    def refused(*_):
        raise torch.OutOfMemoryError("an injected failure")

    model = TreeModel(decoder, make_attention("tree"), 1 << 20)
    free = model.store.device.num_free
    requests = [PrefillRequest((), model.store.create(), range(1, 40), 0) for _ in range(3)]
    monkeypatch.setattr(decoder, "hidden", refused)
    with pytest.raises(DeviceMemoryError):
        model.prefill(requests)
    assert model.store.device.num_free == free
    model.store.check()


def chained(model, monkeypatch, *, at_once):
    """Steps behind one prompt, what follows them, one cut inside, and a step behind that: their
    hidden states and KV, and how many passes they took."""
    root = model.store.create()
    model.prefill([PrefillRequest((), root, range(1, 20), 0, read=())])
    steps = [model.store.create() for _ in range(6)]
    above = (PathPart(root, 19),)
    first, cut = (*above, PathPart(steps[0], 13)), (*above, PathPart(steps[1], 3))
    tokens = ((above, 13), (above, 5), (first, 9), (cut, 21), (first, 2))
    requests = [
        PrefillRequest(path, step, range(10, 10 + length), sum(part.visible for part in path))
        for step, (path, length) in zip(steps, tokens, strict=False)
    ]
    last = (*cut, PathPart(steps[3], 21))
    requests.append(PrefillRequest(last, steps[5], range(30, 37), 43))
    passes, hidden = [], model.decoder.hidden
    monkeypatch.setattr(model.decoder, "hidden", lambda *a: passes.append(0) or hidden(*a))
    batches = [requests] if at_once else [requests[:2], requests[2:5], requests[5:]]
    found = [states for batch in batches for states in model.prefill(batch)]
    monkeypatch.setattr(model.decoder, "hidden", hidden)
    model.store.check()
    return found, [model.store.gather(step, step.length) for step in steps], len(passes)


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="for Triton's interpreter"
)
WINDOWS = (LayerGroup((0,), 2, 16), LayerGroup((1,), 2, 16, window=8))


@pytest.mark.parametrize(
    ("backend", "kept", "groups", "num_passes"),
    [
        ("tree", "auto", (), 1),
        ("tree", "int8", (), 1),
        ("tree", "auto", WINDOWS, 1),
        ("reference", "auto", (), 1),
        ("dense", "auto", (), 3),  # a copy for every path is made before the pass
        pytest.param(*("triton-tree", "auto", (), 1), marks=needs_triton),
    ],
)
@torch.inference_mode()
def test_what_follows_a_step_may_be_read_in_its_pass(
    monkeypatch, backend, kept, groups, num_passes
):
    """FlashTTS 4.1.3 sends two steps as one request; here to the same bits as apart.

    No program may keep what another reads: the interpreter, which runs one by one, would not tell.
    """
    decoder = random_decoder(replace(shape_from_text(SHAPE), groups=groups), pack=prepack_linear)
    if kept != "auto":
        decoder.set_kv_dtype(kept)

    def run(at_once):
        model = TreeModel(decoder, make_attention(backend), 1 << 24)
        return chained(model, monkeypatch, at_once=at_once)

    together, apart = run(True), run(False)
    for one, other in zip(together[:2], apart[:2], strict=True):
        assert all(map(torch.equal, one, other))
    assert (together[2], apart[2]) == (num_passes, 3)
