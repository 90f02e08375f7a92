"""What a verifier makes beside KV: no logits of a whole batch, and no more than was set aside."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen3Config

import fakes
from beamwright.attention import make_attention
from beamwright.models.load import load_model
from beamwright.models.shape import HEAD_TOKENS
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright.solver.model_bytes import ModelBytes
from beamwright.verify.prm import PrmVerifier
from beamwright.verify.spec import LIKELIHOOD_SPEC
from fakes import grow, new_tree


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made under it: `peak`, the most bytes at a time; `largest`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            key, size = storage._cdata, storage.nbytes()
            if key not in given | self._known:
                self._known.add(key)
                self.now += size
                self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
                weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key, size):
        self._known.discard(key)
        self.now -= size


def storages(tree):
    found = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in found if leaf.layout is torch.strided]


N, VOCAB = 24, 4096
TEXTS = [f"{i} {'ab' * 60}{i * 'a'}\n\n" for i in range(N)]
SIZES = {**fakes.SMALL, "vocab_size": VOCAB, "num_key_value_heads": 2}
KINDS = {
    "qwen2": Qwen2Config(**SIZES),
    "wide KV": Qwen3Config(**SIZES, head_dim=64),
}


@pytest.fixture(params=KINDS)
def verifier(request, tmp_path):
    fakes.write_tokenizer(tmp_path)
    fakes.write_checkpoint(tmp_path, KINDS[request.param], noise=0.1)
    loaded = load_model(str(tmp_path), ModelSettings(), role="verifier")
    model = TreeModel(loaded.decoder, make_attention("tree"), 2**26)
    return PrmVerifier(LIKELIHOOD_SPEC, loaded, model)


def read(verifier, texts=TEXTS):
    tree = new_tree("A problem.")
    steps = grow(tree, tree.root, texts)
    return steps, verifier.score(steps)


def test_a_round_takes_what_was_set_aside_for_it(verifier):
    read(verifier, TEXTS[:1])  # what is made once
    model = verifier.tree_model
    model.store.reset_peaks()
    with LiveBytes() as live:
        steps, _ = read(verifier)
    num_tokens = sum(step.usage["verifier_prefilled"] for step in steps)
    assert num_tokens > 8 * HEAD_TOKENS
    assert live.largest < num_tokens * VOCAB
    sizes = ModelBytes(model.decoder.shape, 4, scores=True)
    assert live.peak - model.store.scratch.peak_bytes < sizes.activations(N)


def test_logits_that_do_not_fit_are_made_of_fewer_tokens(verifier, monkeypatch):
    _, expected = read(verifier)
    decoder, refused = verifier.tree_model.decoder, []
    real = decoder.logits

    def logits(hidden):
        if len(hidden) > 32:
            refused.append(len(hidden))
            raise torch.OutOfMemoryError("an injected failure")
        return real(hidden)

    monkeypatch.setattr(decoder, "logits", logits)
    _, scores = read(verifier)
    assert scores == expected
    assert {256, 128, 64} <= set(refused)
    monkeypatch.setattr(decoder, "logits", lambda hidden: logits(torch.zeros(64)))
    with pytest.raises(torch.OutOfMemoryError):
        read(verifier)


def test_a_head_on_a_card_always_gets_as_many_tokens(verifier, monkeypatch):
    """A library may choose another kernel for another number."""
    _, expected = read(verifier)
    real, asked = verifier._head, []

    def head(hidden, token_ids, at):
        asked.append(len(at))
        return real(hidden, token_ids, at)

    class Card(torch.Tensor):
        device = torch.device("cuda")

    model = verifier.tree_model
    prefill = model.prefill
    on_card = partial(map, lambda states: states.as_subclass(Card))
    monkeypatch.setattr(model, "prefill", lambda requests: [*on_card(prefill(requests))])
    monkeypatch.setattr(torch, "tensor", partial(_here, torch.tensor))
    monkeypatch.setattr(verifier, "_head", head)
    for texts in (TEXTS[:1], TEXTS):
        asked.clear()
        _, scores = read(verifier, texts)
        assert set(asked) == {HEAD_TOKENS}
        assert scores == expected[: len(texts)]


def _here(make, values, device=None, **how):
    """Whatever the device, on a CPU."""
    return make(values, **how)
