import pytest
import torch

from attention.conftest import largest_difference, plain_softmax
from beamwright.attention import BACKENDS, make_attention
from beamwright.attention.dense import DenseDecode
from beamwright.attention.shared import SharedSegments
from beamwright.kv.segments import PathPart
from beamwright.kv.tails import RowTails

FAST = ["dense", "tree"]
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5}
# The depth seeds the tree. Every two of (depth, backend, dtype) meet, and so each backend has six
# trees in each dtype; nothing in a backend asks for all three.
TREES = [
    (depth, backend, [*CLOSE][(depth + place) % 2])
    for depth in range(1, 13)
    for place, backend in enumerate(FAST)
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 4])
def test_every_backend_is_softmax_attention(make_forest, backend, group):
    forest = make_forest(3, group=group, rows=5)
    rows = list(range(5))
    found = forest.decode(backend, rows, 3)
    assert largest_difference(found, plain_softmax(forest, rows, 3)) < 1e-10


@pytest.mark.parametrize(("depth", "backend", "dtype"), TREES)
def test_prefill_on_random_trees_equals_the_reference(make_forest, backend, dtype, depth):
    forest = make_forest(depth, dtype=dtype, seed=depth)
    rows, lengths = list(range(7)), [1, 5, 16, 17, 33, 2, 8]
    found = forest.prefill(backend, rows, lengths, num_padding=depth % 8)
    assert largest_difference(found, forest.prefill("reference", rows, lengths)) < CLOSE[dtype]


# Every two of (head_dim, heads, backend) meet.
HEADS = [
    (head_dim, *heads, FAST[(row + column) % 2])
    for row, head_dim in enumerate([8, 12, 24, 40, 64, 80])
    for column, heads in enumerate([(1, 1), (1, 4), (3, 1), (3, 2), (2, 4)])
]


@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "backend"), HEADS)
def test_grouped_heads_of_any_size(make_forest, backend, head_dim, kv_heads, group):
    forest = make_forest(3, kv_heads=kv_heads, group=group, head_dim=head_dim, rows=6)
    rows = list(range(6))
    found = forest.decode(backend, rows, 2)
    assert largest_difference(found, forest.decode("reference", rows, 2)) < 1e-10
    lengths = [1, 9, 3, 16, 2, 20]
    found = forest.prefill(backend, rows, lengths)
    assert largest_difference(found, forest.prefill("reference", rows, lengths)) < 1e-10


@pytest.mark.parametrize(("rows", "asked"), [(1, 8), (2, 16), (5, 40), (8, 56)])
def test_of_a_segment_eight_queries_are_a_multiple_not_eight_rows(make_forest, rows, asked):
    forest = make_forest(2, group=7, dtype=torch.float32)
    paths = [forest.paths[0][:1]] * rows
    shared = SharedSegments(forest.store, paths)
    index, real = shared.query_index(shared.slots.rows[0], 7)
    assert real == 7 * rows
    assert len(index) == asked * forest.layout.num_kv_heads


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_equals_decoding_the_same_tokens(make_forest, backend):
    """The new tokens see each other causally: their last context is that of a decode."""
    forest = make_forest(2, rows=4)
    rows = list(range(4))
    tokens = [[forest._token(0, t, layer) for t in range(6)] for layer in range(2)]
    view = make_attention(backend).prefill_view(forest.store, forest.paths, [6] * 4)
    decoded = forest.decode(backend, rows, 6)
    for layer in range(2):
        query = torch.stack([q for q, _ in tokens[layer]], dim=1).flatten(0, 1)
        key_value = torch.stack([kv for _, kv in tokens[layer]], dim=1).flatten(0, 1)
        context = view.attend(layer, query, key_value).view(4, 6, *query.shape[1:])
        for token in range(6):
            assert (context[:, token] - decoded[token][layer]).abs().max() < 1e-10
    view.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rows_bits_do_not_depend_on_order_or_split_when_prefilling(make_forest, backend):
    forest = make_forest(5, dtype=torch.float32, rows=12, seed=2)
    lengths = [1, 40, 7, 16, 17, 3, 8, 25, 31, 2, 12, 5]
    whole = forest.prefill(backend, list(range(12)), lengths)
    for split in ([list(range(12))[::-1]], [[r] for r in range(12)], [[4, 1, 9], [0, 2, 3]]):
        for batch in split:
            part = forest.prefill(backend, batch, [lengths[row] for row in batch])
            for layer in range(2):
                for i, row in enumerate(batch):
                    assert torch.equal(whole[layer][row], part[layer][i])


def test_per_beam_copies_are_counted_and_given_back(make_forest, make_batch):
    forest = make_forest(3)
    scratch, used = forest.store.scratch, forest.store.pool.budget.used_bytes
    batch = make_batch(forest, "dense")
    batch.arrange([], range(8))
    copied = sum(part.visible for path in forest.paths[:8] for part in path)
    assert scratch.used_bytes >= copied * forest.layout.bytes_per_token
    assert forest.store.pool.budget.used_bytes == used
    batch.close()
    assert scratch.used_bytes == 0


def test_shared_segments_are_counted_once(make_forest):
    forest = make_forest(3)
    path = forest.paths[0]
    counted = []
    for rows in (1, 4):
        view = make_attention("tree").prefill_view(forest.store, [path] * rows, [1] * rows)
        counted.append(forest.store.scratch.used_bytes)
        view.close()
        assert forest.store.scratch.used_bytes == 0
    assert counted[0] == counted[1] > 0


def test_each_row_reads_its_own_device_copy(make_forest):
    """The k-th row through a segment gathers from its k-th copy; more rows read the last one."""
    forest = make_forest(1, dtype=torch.float32)
    store, segment = forest.store, forest.store.create()
    store.append([segment], [forest.draw(7, 20, 2, 2, 2, 16)])
    first = segment.copies[0]
    segment.copies.append(store.pool.allocate(len(first)))
    store.copy_on_device(first, segment.copies[1])
    store.pool.storage[segment.copies[1]] += 1.0
    view = DenseDecode(store, [(PathPart(segment, 20),)] * 3, RowTails(store, 0))
    for layer in range(2):
        one, two, three = view._layers.layer(layer)[:, :, :, :20].unbind(1)
        assert torch.equal(one + 1.0, two)
        assert torch.equal(two, three)
    view.close()
