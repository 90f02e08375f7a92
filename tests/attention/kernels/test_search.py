"""A whole search with the kernels grows the tree that the torch backend grows."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright.engine import selftest
from beamwright.models.dense import DenseDecoder
from beamwright.models.linear import prepack
from beamwright.models.named import shape_from_text
from beamwright.models.weights import random_weights
from engines import exact_dtype, grow

SMALL = {
    "n": 4,
    "width": 2,
    "max_rounds": 2,
    "max_step_tokens": 3,
    "max_tokens": 6,
    "kv_memory": "512KiB",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_a_search_grows_the_same_tree(make_solver, kernels):
    solver = make_solver(attention="tree", **SMALL)
    expected, _ = grow(solver, "A?")
    solver.generator.backend = kernels("triton-tree")
    found, tree = grow(solver, "A?")
    assert found.tree_hash == expected.tree_hash
    assert found.attention == "triton-tree"
    assert max(len(node.path()) for node in tree.nodes()) == 3


@pytest.fixture
def brief(monkeypatch):
    """A decoder for a self-test as short as an interpreter needs it."""
    shape = shape_from_text(
        "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=64,vocab=64,context=64"
    )
    monkeypatch.setattr(selftest, "_KV_TOKENS", 1024)
    monkeypatch.setattr(selftest, "_STEPS", 2)
    monkeypatch.setattr(selftest, "_DECODED", (0, 15))
    return DenseDecoder(shape, random_weights(shape, torch.float32, "cpu", 0, pack=prepack))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
@pytest.mark.parametrize("name", ["triton-tree", "triton-dense"])
def test_the_self_test_asks_kernels_too(kernels, brief, name):
    assert selftest.batches_are_exact(brief, kernels(name)) or exact_dtype() == "float64"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the solver of this test is on the CPU")
def test_with_kernels_too_a_decoder_that_follows_the_batch_is_found_out(
    kernels, brief, monkeypatch
):
    real = DenseDecoder.logits
    monkeypatch.setattr(DenseDecoder, "logits", lambda self, x: real(self, x) + 1e-5 * len(x))
    assert not selftest.batches_are_exact(brief, kernels("triton-tree"))
