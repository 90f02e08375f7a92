"""Windows, soft caps and sinks in the kernels: the oracle's results, and bits of a row's own."""

import pytest
import torch

pytest.importorskip("triton")

KINDS = {
    "window": {"window": 16},
    "softcap": {"softcap": 2.0},
    "all": {"window": 40, "softcap": 2.0},
}


def largest_difference(left, right):
    pairs = [pair for x, y in zip(left, right, strict=True) for pair in zip(x, y, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.fixture
def make_sunk(make_small):
    """Paths of up to 150 tokens; every head has a sink."""

    def make(kind, **options):
        forest = make_small(6, rows=6, seed=3, **KINDS[kind], **options)
        forest.sinks = forest.draw(5, forest.num_heads)
        return forest

    return make


@pytest.mark.parametrize("name", ["triton-tree", "triton-dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_reference(make_sunk, kernels, name, kind):
    """While the window slides; rows hold more and less than it in their tails."""
    forest, held = make_sunk(kind), {1: 3, 2: 70, 4: 17}
    found = forest.decode(kernels(name), range(6), 3, held=held)
    expected = forest.decode("reference", range(6), 3, held=held)
    assert largest_difference(found, expected) < 1e-5
    lengths = [70, 1, 2, 30, 1, 9]
    chunk = forest.prefill(kernels(name), range(6), lengths, num_padding=2)
    assert largest_difference(chunk, forest.prefill("reference", range(6), lengths)) < 1e-5


def test_a_rows_bits_do_not_depend_on_its_batch(make_sunk, kernels):
    forest, held = make_sunk("all"), {1: 3, 2: 70, 4: 17}
    whole = forest.decode(kernels("triton-tree"), range(6), 2, held=held)
    for batch in ([3], [5, 2], [4, 1, 0]):
        part = forest.decode(kernels("triton-tree"), batch, 2, held=held)
        for token, (place, row) in ((t, pair) for t in range(2) for pair in enumerate(batch)):
            assert torch.equal(part[token][0][place], whole[token][0][row])


def test_what_lies_before_every_window_may_be_left_out(make_sunk, kernels):
    forest = make_sunk("window")
    whole = forest.decode(kernels("triton-tree"), range(6), 2)
    forest.paths = [path[-1:] if path and path[-1].visible >= 16 else path for path in forest.paths]
    assert any(len(path) == 1 for path in forest.paths)
    assert largest_difference(forest.decode(kernels("triton-tree"), range(6), 2), whole) < 1e-5


@pytest.mark.parametrize("block_tokens", [1, 64, 256])
def test_blocks_may_be_smaller_and_larger_than_a_tile(make_sunk, kernels, block_tokens):
    """Those of groups of layers are: all have as many bytes, and hold as many tokens as fit."""
    forest = make_sunk("window", block_tokens=block_tokens, pool_tokens=16384)
    found = forest.decode(kernels("triton-tree"), range(6), 2)
    assert largest_difference(found, forest.decode("reference", range(6), 2)) < 1e-5
    chunk = forest.prefill(kernels("triton-tree"), range(6), [9] * 6)
    assert largest_difference(chunk, forest.prefill("reference", range(6), [9] * 6)) < 1e-5
