"""Windows, soft caps and sinks: every backend computes what the definition says, in the same bits
whoever shares the batch."""

from itertools import product

import pytest
import torch

from attention.conftest import largest_difference
from beamwright.attention import BACKENDS
from beamwright.attention.partial import attend_part, attend_part_oracle, hide
from beamwright.attention.reference import plain_attention
from beamwright.attention.shared import tokens_behind
from beamwright.kv.pool import KVLayout
from beamwright.kv.segments import PathPart, Segment

FAST = ["dense", "tree"]
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5}
KINDS = {
    "window-16": {"window": 16},
    "window-64": {"window": 64},
    "softcap": {"softcap": 2.0},
    "window-and-softcap": {"window": 16, "softcap": 2.0},
    "plain": {},
}


def by_definition(query, keys, values, window, softcap, sinks):
    """One token's context [heads, head_dim]; it is the last of keys, values [all, kv_heads, dim].

    Head by head and key by key, without a mask: what is not seen is not there.
    """
    first = 0 if window is None else max(0, len(keys) - window)
    found, group = [], len(query) // keys.shape[1]
    for head, asked in enumerate(query):
        seen, held = keys[first:, head // group], values[first:, head // group]
        scores = seen @ asked / len(asked) ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        found.append((weights / total) @ held)
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_oracle_is_the_definition(kind, with_sinks):
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    query, keys, values = draw(5, 4, 8), draw(40, 2, 8), draw(40, 2, 8)
    layout = KVLayout(1, 2, 8, torch.float64, **KINDS[kind])
    sinks = draw(4) if with_sinks else None
    found = plain_attention(query, keys, values, layout, sinks)
    for place in range(5):
        seen = 40 - 4 + place
        expected = by_definition(
            query[place], keys[:seen], values[:seen], layout.window, layout.softcap, sinks
        )
        assert (found[place] - expected).abs().max() < 1e-12


def sunk(forest, with_sinks):
    """The forest, whose heads have sinks or not."""
    forest.sinks = forest.draw(5, forest.num_heads) if with_sinks else None
    return forest


EVERY = [
    (kind, backend, dtype, bool(number % 2))
    for number, (kind, backend, dtype) in enumerate(product(KINDS, FAST, CLOSE))
] + [(kind, backend, torch.float64, True) for kind in KINDS for backend in FAST]


@pytest.mark.parametrize(("kind", "backend", "dtype", "with_sinks"), EVERY)
def test_every_backend_is_the_oracle(make_forest, kind, backend, dtype, with_sinks):
    """While a window slides over a path of up to 200 tokens, and rows leave."""
    forest = sunk(make_forest(8, dtype=dtype, seed=3, **KINDS[kind]), with_sinks)
    held = {row: 7 * row % 40 for row in range(11)}
    keep = {9: [10, 0, 4, 5, 2, 7]}
    found = forest.decode(backend, range(11), 20, keep=keep, held=held)
    expected = forest.decode("reference", range(11), 20, keep=keep, held=held)
    assert largest_difference(found, expected) < CLOSE[dtype]
    lengths = [1, 5, 16, 17, 70, 2, 8]
    found = forest.prefill(backend, range(7), lengths, num_padding=3)
    expected = forest.prefill("reference", range(7), lengths)
    assert largest_difference(found, expected) < CLOSE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["window-16", "window-64", "window-and-softcap", "softcap"])
def test_a_rows_bits_do_not_depend_on_its_batch(make_forest, backend, kind):
    forest = make_forest(8, dtype=torch.float32, rows=12, seed=5, **KINDS[kind])
    forest = sunk(forest, with_sinks=True)
    held = {row: 11 * row % 50 for row in range(12)}
    lengths = [1, 40, 7, 16, 17, 3, 8, 25, 31, 2, 12, 5]
    whole = forest.decode(backend, range(12), 3, held=held)
    filled = forest.prefill(backend, range(12), lengths)
    for batch in ([7], [11, 3], [*range(12)][::-1], [4, 1, 9], [0, 2, 3, 5, 6, 8, 10]):
        part = forest.decode(backend, batch, 3, held=held)
        some = forest.prefill(backend, batch, [lengths[row] for row in batch])
        for layer, (place, row) in product(range(2), enumerate(batch)):
            assert torch.equal(filled[layer][row], some[layer][place])
            for token in range(3):
                assert torch.equal(whole[token][layer][row], part[token][layer][place])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_before_every_window_may_be_left_out(make_forest, backend):
    """Distances count, not positions: a path without its first parts is as good."""
    forest = make_forest(8, seed=3, window=16)
    whole = forest.decode(backend, range(11), 20)
    short = []
    for path in forest.paths:
        reach = zip(path, tokens_behind(path), strict=True)
        short.append(tuple(part for part, behind in reach if behind + 1 < 16))
    assert sum(map(len, short)) < sum(map(len, forest.paths)) / 2
    forest.paths = short
    assert largest_difference(whole, forest.decode(backend, range(11), 20)) < 1e-10


def test_tokens_behind_each_part():
    parts = [PathPart(Segment(), visible) for visible in (5, 3, 4)]
    assert tokens_behind(tuple(parts)) == [7, 4, 0]
    assert tokens_behind(()) == []


@pytest.mark.parametrize("attend", [attend_part, attend_part_oracle])
def test_a_part_that_is_not_seen_has_no_weight_and_is_a_number(attend):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 8, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, 32, 16, generator=generator).unbind()
    mask = torch.zeros(1, 1, 8, 32)
    mask[:, :, :3] = -torch.inf
    blind = mask.isinf().all(-1).squeeze(1)
    context, lse = hide(attend(query, keys, values, mask), blind)
    assert torch.equal(context[:, :3], torch.zeros(1, 3, 2, 16))
    assert lse[:, :3].isneginf().all()
    assert lse[:, 3:].isfinite().all()
    seen, _ = attend(query, keys, values, None)
    assert (context[:, 3:] - seen[:, 3:]).abs().max() < 1e-6
