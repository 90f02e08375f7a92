"""Captured prefills: padded to a few sizes, replayed, and bit for bit the plain passes."""

import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("triton")

import fakes
from beamwright.attention import make_attention
from beamwright.engine.graphs import capture_prefills
from beamwright.kv.segments import PathPart
from beamwright.models import layer_kernels, prefill_passes
from beamwright.models.load import load_model
from beamwright.models.prefill import PrefillRequest
from beamwright.models.prefill_passes import Replay
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from engines import random_decoder
from tape import TapeReplay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = "llama,layers=2,hidden=16,heads=2,kv_heads=1,intermediate=24,vocab=64,context=128"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="the tape is the interpreter's")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The interpreter runs each program of a size."""
    monkeypatch.setattr(prefill_passes, "SIZES", (16, 32))
    monkeypatch.setattr(prefill_passes, "_FEW", 8)


def make_model(backend="triton-tree", shape=SHAPE, kernels=None, kept="auto", **changes):
    decoder = random_decoder(shape, device=DEVICE, **changes)
    decoder._fused = kernels
    if kept != "auto":
        decoder.set_kv_dtype(kept)
    return TreeModel(decoder, make_attention(backend, torch.device(DEVICE), torch.float32), 1 << 16)


@torch.inference_mode()
def passes(model):
    """Hidden states of passes of several kinds one behind the other, and all KV behind them."""
    store, found, segments = model.store, [], []

    def run(*requests):
        held = [store.create(start=start) for _, start, _, _ in requests]
        segments.extend(held)
        asked = [
            PrefillRequest(path, segment, [(7 * at) % 61 for at in range(count)], start, read)
            for segment, (path, start, count, read) in zip(held, requests, strict=True)
        ]
        found.extend(model.prefill(asked))
        return held

    (prompt,) = run(((), 0, 11, ()))
    path = (PathPart(prompt, 11),)
    for count in (9, 8, 10):  # a plain run, a captured one, a replay; of one kind and of another
        steps = run(*[(path, 11, each, [each - 1]) for each in (count, 12, 3)])
        path = (*path[:1], PathPart(steps[0], count))
        run((path, 11 + count, 13, None), ((), 0, 1, None))
    run((path, 21, 40, [39]))
    return found, [store.gather(segment, segment.length).clone() for segment in segments]


def equal(found, expected):
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def plain():
    return passes(make_model())


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no card")
def test_cuda_graphs_have_the_bits_of_plain_passes():
    """Both padded: these products, in float32 by the library, follow the batch."""
    called, model, failures = make_model(), make_model(), []
    called.capture(Replay())
    capture_prefills("auto", model, failures.append)
    assert equal(passes(model), passes(called))
    assert model.captured.replay._graphs
    assert not failures


@on_cpu
def test_replays_have_the_bits_of_plain_passes(plain, monkeypatch):
    """KV included; one with more tokens than any size is plain."""
    model, replay = make_model(), TapeReplay(monkeypatch)
    model.capture(replay)
    assert equal(passes(model), plain)
    assert replay.keys == {(16, True), (32, True), (32, False)}
    assert (replay.num_recorded, replay.num_played) == (3, 4)


@on_cpu
@pytest.mark.parametrize(
    "options",
    [
        {"tile_rows": 8},
        {"shape": SHAPE.replace("llama", "opt").replace("kv_heads=1,", "")},
        {"kernels": layer_kernels},
        {"kept": "fp8"},
    ],
)
def test_other_decoders_are_captured_too(monkeypatch, options):
    """Rows by tiles of a fixed size; no rotation, and a bias; a card's kernels; KV in 8 bits."""
    expected, model = passes(make_model(**options)), make_model(**options)
    model.capture(TapeReplay(monkeypatch))
    assert equal(passes(model), expected)


@on_cpu
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("phi3", {}), ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 8})],
)
def test_modules_of_transformers_are_captured_too(monkeypatch, tmp_path, kind, changes):
    """With windows in some layers, whose KV is in blocks of their own."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": fakes.VOCAB}
    fakes.write_tokenizer(tmp_path)
    fakes.write_checkpoint(tmp_path, AutoConfig.for_model(kind, **sizes, pad_token_id=0, **changes))
    settings = ModelSettings(model=str(tmp_path), decoder="transformers", dtype="float32")
    decoder = load_model(str(tmp_path), settings).decoder
    backend = make_attention("triton-tree", decoder.device, decoder.dtype)
    plain, model = (TreeModel(decoder, backend, 1 << 18) for _ in range(2))
    model.capture(TapeReplay(monkeypatch))
    assert equal(passes(model), passes(plain))
    assert len(model.store.groups) == 1 + bool(changes)


def test_kv_that_attention_does_not_keep_is_written_as_it_was(plain):
    model = make_model("triton-dense")
    model.capture(Replay())
    assert model.captured is None
    for these, those in zip(passes(model), plain, strict=True):
        for a, b in zip(these, those, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
