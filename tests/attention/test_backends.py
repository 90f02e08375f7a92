"""Every torch backend computes what the definition says, with windows, soft caps and sinks."""

from itertools import product

import pytest
import torch

from attention.conftest import Batch, largest_difference, plain_softmax
from beamwright.attention import BACKENDS, make_attention
from beamwright.attention.buckets import tokens_after

CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
KINDS = {
    "plain": {},
    "window-16": {"window": 16},
    "window-64": {"window": 64},
    "softcap": {"softcap": 2.0},
    "window-and-softcap": {"window": 16, "softcap": 2.0},
}
WAYS = [*product(KINDS, ["dense", "tree"], CLOSE)]
HEADS = [(16, 2, 2), (8, 1, 1), (12, 1, 4), (24, 3, 1), (40, 3, 2), (64, 2, 4), (80, 1, 4)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_with_tails_of_any_lengths_are_softmax_attention(
    make_forest, backend, kind, with_sinks
):
    """The reference too: each row alone, from its first token on, by the definition."""
    forest, held = make_forest(3, rows=4, **KINDS[kind]), {0: 3, 2: 20, 3: 1}
    forest.sinks = forest.draw(5, forest.num_heads) if with_sinks else None
    found = forest.decode(backend, range(4), 2, held=held)
    for row in range(4):
        alone = plain_softmax(forest, [row], held.get(row, 0) + 2)[-2:]
        mine = [[layer[row : row + 1] for layer in token] for token in found]
        assert largest_difference(mine, alone) < 1e-10


@pytest.mark.parametrize("number", range(60))
def test_every_backend_is_the_oracle(make_forest, number):
    """On random trees of any heads, while windows slide, rows leave and tails fill up."""
    kind, backend, dtype = WAYS[number % len(WAYS)]
    head_dim, kv_heads, group = HEADS[number % len(HEADS)]
    shape = {"head_dim": head_dim, "kv_heads": kv_heads, "group": group, **KINDS[kind]}
    forest = make_forest(1 + number % 12, dtype=dtype, seed=number, **shape)
    forest.sinks = forest.draw(5, forest.num_heads) if number % 3 else None
    num_tokens = 20 if number % 4 == 1 else 2
    most = make_attention(backend).tail_tokens - num_tokens
    edges = [0, 1, 15, 16, 17, 32, 33, most - 1, most] if number % 4 == 2 else range(40)
    held = {row: edges[(7 * row + number) % len(edges)] for row in range(11)}
    how = {"held": held, "keep": {num_tokens // 2: [10, 0, 4, 5, 2, 7]}}
    rows, lengths = range(11), [1, 5, 16, 17, 70, 2, 8, 33, 1, 2, 3]
    found = forest.distance(backend, rows, num_tokens, lengths, number % 8, **how)
    assert found < CLOSE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_its_batch(make_forest, backend, kind):
    forest = make_forest(8, dtype=torch.float32, rows=12, seed=5, **KINDS[kind])
    forest.sinks = forest.draw(5, forest.num_heads)
    batches = [7], [11, 3], [*range(12)][::-1], [4, 1, 9], [0, 2, 3, 5, 6, 8, 10]
    lengths = [1, 40, 7, 16, 17, 3, 8, 25, 31, 2, 12, 5]
    most = make_attention(backend).tail_tokens - 3
    for counts in ([11 * row % 50 for row in range(12)], [0, 15, 16, 17, 31, 32, 33, 64, 128, 255]):
        held = {row: min(count, most) for row, count in enumerate(counts)}
        forest.assert_bits(backend, batches, 3, lengths, held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_equals_decoding_the_same_tokens(make_forest, backend):
    """The new tokens see each other causally: their last context is that of a decode."""
    forest = make_forest(2, rows=4)
    view = make_attention(backend).prefill_view(forest.store, forest.paths, [6] * 4)
    decoded = forest.decode(backend, range(4), 6)
    for layer in range(2):
        tokens = zip(*[forest._token(0, t, layer) for t in range(6)], strict=True)
        query, key_value = (torch.stack(each, dim=1) for each in tokens)
        context = view.attend(layer, query.flatten(0, 1), key_value.flatten(0, 1))
        expected = torch.stack([token[layer] for token in decoded], dim=1)
        assert (context.view_as(query) - expected).abs().max() < 1e-10
    view.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_before_every_window_may_be_left_out(make_forest, backend):
    """Distances count, not positions: a path without its first parts is as good."""
    forest = make_forest(8, seed=3, window=16)
    whole = forest.decode(backend, range(11), 20)
    short = []
    for path in forest.paths:
        reach = zip(path, tokens_after(path), strict=True)
        short.append(tuple(part for part, behind in reach if behind + 1 < 16))
    assert sum(map(len, short)) < sum(map(len, forest.paths)) / 2
    forest.paths = short
    assert largest_difference(whole, forest.decode(backend, range(11), 20)) < 1e-10


# --- rows whose tails have other lengths ------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_join_and_leave_keep_their_bits(make_forest, backend):
    """Between any two tokens some leave and others join, with tokens of their own or without."""
    forest = make_forest(4, dtype=torch.float32, rows=12, seed=6)
    arrangements = [
        ([], [11, 0, 4, 5, 1, 9, 2, 10]),
        ([4, 2, 0, 1, 3, 5], [3, 8]),
        ([7, 6, 5, 4, 3, 2, 1, 0], []),
        ([0, 1, 2, 3, 4], [6, 7, 9]),
    ]
    forest.assert_joins(backend, arrangements, 5, {row: 7 * row % 58 for row in range(12)})


@pytest.mark.parametrize(("head_dim", "group"), [(8, 1), (8, 2), (20, 1), (64, 4)])
def test_every_length_of_a_tail_has_the_same_bits_in_any_company(make_forest, head_dim, group):
    """`tree`, through all of 1..256 tokens: alone, and beside rows that are longer or shorter."""
    shape = {"layers": 1, "head_dim": head_dim, "group": group}
    forest = make_forest(2, dtype=torch.float32, rows=8, **shape)
    alone, mixed = Batch(forest, "tree"), Batch(forest, "tree")
    alone.arrange([], [0] * 8)
    mixed.arrange([], range(8), {1: 255, 2: 100, 3: 40, 4: 17})
    for length in range(1, 257):
        assert torch.equal(alone.token()[0][0], mixed.token()[0][0]), length
        # The others: one is full, one is a few tokens behind, the rest begin again and again.
        mixed.held[1:] = [255, max(0, length - 9), *(length * n % 251 for n in range(3, 8))]
    alone.close()
    mixed.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_nans_leaves_the_others_alone(make_forest, backend):
    """One whose logits overflow fails by itself, also where others have fewer parts than it."""
    forest = make_forest(4, dtype=torch.float32, rows=9)
    expected = forest.decode(backend, range(9), 3)
    for token in range(3):
        for layer in range(2):
            forest._token(0, token, layer)[1][0] = torch.nan
    found = forest.decode(backend, range(9), 3)
    for token in range(3):
        for a, b in zip(found[token], expected[token], strict=True):
            assert a[0].isnan().all()
            assert torch.equal(a[1:], b[1:])


def test_a_row_that_joins_reads_nothing_of_a_row_of_nans(make_forest):
    """It takes the other's place in the tail, and hides what follows its own tokens."""
    forest = make_forest(3, dtype=torch.float32, rows=9, layers=1)
    expected = forest.decode("tree", [*range(7), 8], 1)[0][0]
    batch = Batch(forest, "tree")
    batch.arrange([], range(8))
    forest._token(0, 1, 0)[1][7] = torch.nan
    batch.token()
    batch.token()
    batch.arrange([0, 1, 2, 3, 4, 5, 6], [8])
    batch.held = [0] * 8
    assert torch.equal(batch.token()[0], expected)
    batch.close()


# --- working memory --------------------------------------------------------------------------


def test_per_beam_copies_are_counted_and_given_back(make_forest):
    forest = make_forest(3)
    scratch, used = forest.store.scratch, forest.store.pool.budget.used_bytes
    batch = Batch(forest, "dense")
    batch.arrange([], range(8))
    copied = sum(part.visible for path in forest.paths[:8] for part in path)
    assert scratch.used_bytes >= copied * forest.layout.bytes_per_token
    assert forest.store.pool.budget.used_bytes == used
    batch.close()
    assert scratch.used_bytes == 0


def test_shared_segments_are_counted_once(make_forest):
    forest = make_forest(3)
    path, counted = forest.paths[0], []
    for rows in (1, 4):
        view = make_attention("tree").prefill_view(forest.store, [path] * rows, [1] * rows)
        counted.append(forest.store.scratch.used_bytes)
        view.close()
        assert forest.store.scratch.used_bytes == 0
    assert counted[0] == counted[1] > 0


def test_each_row_reads_its_own_device_copy(make_forest):
    """The k-th row through a segment gathers from its k-th copy; more rows read the last one."""
    forest = make_forest(1, rows=3)
    path, other = forest.chain(20), forest.chain(20, seed=1)
    path[0].segment.copies.append(other[0].segment.blocks)
    forest.paths = [path] * 3
    found = forest.decode("dense", range(3), 1)
    path[0].segment.copies.pop()
    forest.paths = [path, other, other]
    assert largest_difference(found, forest.decode("reference", range(3), 1)) < 1e-10
