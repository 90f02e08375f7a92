"""The kernels against the oracle: shapes, dtypes, cuts; and a row's bits against its company."""

import pytest
import torch

pytest.importorskip("triton")

from attention.conftest import Batch, largest_difference
from beamwright.kv.codes import round_to_grid
from beamwright.kv.segments import PathPart

NAMES = ["triton-tree", "triton-dense"]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [
    # every supported head_dim and dtype, an odd one, groups of one and larger than a small tile
    ("triton-tree", torch.float16, 1, 6, 64),
    ("triton-dense", torch.float16, 2, 1, 80),
    ("triton-tree", torch.bfloat16, 1, 8, 96),
    ("triton-dense", torch.bfloat16, 1, 7, 128),
    ("triton-tree", torch.float16, 1, 2, 256),
    ("triton-dense", torch.float32, 2, 2, 20),
    ("triton-tree", torch.float32, 2, 2, 20),
    ("triton-tree", torch.float32, 1, 20, 16),
]


KEPT = ["auto", "int8", "fp8"]
KINDS = {
    "window": {"window": 16},
    "softcap": {"softcap": 2.0},
    "all": {"window": 40, "softcap": 2.0},
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(("name", "dtype", "kv_heads", "group", "head_dim"), SHAPES)
def test_kernels_equal_the_reference(
    make_small, kernels, name, dtype, kv_heads, group, head_dim, kept
):
    shape = {"dtype": dtype, "kv_heads": kv_heads, "group": group, "head_dim": head_dim}
    window = 20 if kept != "auto" and group == 20 else None
    forest = make_small(3, **shape, kept=kept, layers=1 + (kept != "auto"), window=window)
    assert forest.distance(kernels(name, dtype), [0, 1], 2, [1, 18], 2) < CLOSE[dtype]


@pytest.fixture
def make_sunk(make_small):
    """Paths of up to 150 tokens; every head has a sink."""

    def make(kind, **options):
        forest = make_small(6, rows=6, seed=3, **KINDS[kind], **options)
        forest.sinks = forest.draw(5, forest.num_heads)
        return forest

    return make


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        *((name, kind, {}) for name in NAMES for kind in KINDS),
        # Blocks are smaller and larger than a tile; those of groups of layers are: all have as many
        # bytes, and hold as many tokens as fit.
        *(("triton-tree", "window", {"block_tokens": n, "pool_tokens": 16384}) for n in (1, 256)),
    ],
    ids=str,
)
def test_windows_and_sinks_equal_the_reference(make_sunk, kernels, name, kind, options):
    """While the window slides; rows hold more and less than it in their tails."""
    forest, held = make_sunk(kind, **options), {} if options else {1: 3, 2: 70, 4: 17}
    lengths = [9] * 6 if options else [70, 1, 2, 30, 1, 9]
    assert forest.distance(kernels(name), range(6), 3, lengths, 2, held=held) < 1e-5


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_every_code_is_decoded_exactly(make_small, kernels, kept):
    """Values are codes of every kind, at scales of every size; a row that sees one reads it."""
    forest = make_small(1, kept=kept, head_dim=256, rows=1)
    codes = torch.arange(-128, 128).to(torch.int8)
    codes = codes[codes != -128] if kept == "int8" else codes[(codes & 0x7F) != 0x7F]
    exponents = torch.tensor([-60, -9, 0, 3, 60], dtype=torch.int8)
    for exponent in exponents:
        forest.paths = [forest.chain(1)]
        segment = forest.paths[0][0].segment
        kv, block = forest.store.pool.kv, segment.blocks[0]
        kv.storage[block, 0, 1, 0, 0, : len(codes)] = codes.to(kv.storage.device)
        kv.exponents[block, 0, 1, 0, 0] = exponent
        view = kernels("triton-tree").prefill_view(forest.store, forest.paths, [1])
        own = torch.zeros(1, 2, 1, 256, device=forest.device)
        query = torch.zeros(1, forest.num_heads, 256, device=forest.device)
        found = view.attend(0, query, own)[0, 0, : len(codes)]
        read = forest.store.gather(segment, 1)[0, 1, 0, 0, : len(codes)]
        assert torch.equal(found, read / 2)  # of two tokens that weigh the same, one is zero


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_a_chunk_keeps_is_what_would_be_put_there(make_small, kernels, kept, dtype):
    """Numbers of every size, and none: to the byte, and nothing beside them."""
    forest = make_small(1, kept=kept, dtype=dtype, head_dim=20, kv_heads=2)
    store, kv = forest.store, forest.store.pool.kv
    drawn = forest.draw(5, 21, 1, 2, 2, 20)
    sizes = torch.tensor([0, 2.0**-20, 2.0**-7, 1, 3, 100, 3000], device=drawn.device)
    drawn = (drawn * sizes.repeat(3)[:, None, None, None, None]).to(dtype)
    if kept != "auto":
        drawn = round_to_grid(drawn, kept)
    segments = [store.create(), store.create()]
    (slots,) = store.reserve_slots(segments, [9, 12])
    view = kernels("triton-tree", dtype).prefill_view(store, [(), ()], [9, 12], [slots])
    own = torch.cat([drawn[:, 0], drawn[:3, 0]])
    before = store.pool.by_block.clone()
    view.attend(0, forest.draw(6, 24, forest.num_heads, 20), own)
    found = store.pool.by_block.clone()
    store.pool.by_block.copy_(before)
    store.make_writer(segments, [9, 12])(0, 0, drawn[:, 0])
    assert torch.equal(found, store.pool.by_block)
    assert not torch.equal(found, before)
    assert (kv.exponents is None) is (kept == "auto")


def test_a_group_larger_than_a_tile_widens_it(make_small, kernels):
    forest, dtype = make_small(2, dtype=torch.bfloat16, group=71), torch.bfloat16
    assert forest.distance(kernels("triton-tree", dtype), [0], 1) < CLOSE[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_long_paths_are_split_and_merged(make_small, kernels, name):
    """Around the sizes at which paths are cut: 128 or 256 tokens a part, 32 a tile; and more parts
    than the merge takes at once."""
    forest = make_small(1, group=2)
    cuts = [(), (128,), (256,), (257, 1), (129, 64), (40, 200, 30, 7, 250)]
    forest.paths = [forest.chain(*lengths, seed=place) for place, lengths in enumerate(cuts)]
    assert forest.distance(kernels(name), range(6), 1, [70, 1, 2, 3, 1, 9]) < 1e-5
    path = forest.chain(*[3] * 20, seed=7)
    forest.paths = [path, path[:15], path[:16]]
    assert forest.distance(kernels(name), range(3), 1) < 1e-5


# --- rows of different lengths ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rows_join_and_leave_between_tokens(make_small, kernels, name):
    """Each row's contexts have the bits that it has alone, and are those of the reference."""
    forest, held = make_small(3, rows=5, seed=3), {3: 15, 4: 62}
    arrangements = [([], [0, 3]), ([1, 0], [4, 1]), ([2, 0, 3], []), ([1], [2])]
    forest.assert_joins(kernels(name), arrangements, 4, held)
    assert forest.distance(kernels(name), range(5), 4, held=held) < 1e-5
    assert forest.store.scratch.used_bytes == 0


@pytest.mark.parametrize("kept", KEPT)
def test_the_current_token_is_stored_where_the_next_one_reads_it(make_small, kernels, kept):
    """Of every row and head, and from where a product has left it, behind the queries; and
    nothing else is written, but to the block that is nobody's."""
    forest = make_small(1, kv_heads=2, group=3, layers=2, kept=kept)
    batch = Batch(forest, kernels("triton-tree"))
    batch.arrange([], [0, 1, 2], {1: 70, 2: 1})
    batch.begin()
    product = forest.draw(8, 3, 6 + 4, 16)
    query, key_value = product[:, :6], product[:, 6:].unflatten(1, (2, 2))
    if kept != "auto":
        key_value.copy_(round_to_grid(key_value, kept))
    pool = forest.store.pool
    before = pool.by_block.clone()
    found = batch.view.attend(1, query, key_value)
    after = pool.by_block.clone()
    pool.by_block.copy_(before)
    for place, segment in enumerate(batch.own):
        at, count = segment.blocks[batch.held[place] // 8], batch.held[place]
        pool.kv.write((at, 1, slice(None), count % 8), key_value[place])
    assert torch.equal(after[: pool.num_blocks], pool.by_block[: pool.num_blocks])
    again = batch.view.attend(1, query.contiguous(), key_value.contiguous())
    assert torch.equal(again, found)
    batch.close()


def test_who_is_not_read_leaves_all_blocks_alone(make_small, kernels):
    """Rows that pad the batch, and tokens beyond what is reserved, go to the spare block."""
    forest = make_small(1, rows=3)
    batch = Batch(forest, kernels("triton-tree"))
    batch.arrange([], [0, 1, 2], {1: 8, 2: 3})
    alone = batch.token()[0][2]
    pool = forest.store.pool
    beyond = [batch.own[1].copies[0].pop()]
    batch.tail.set_segments([None, (batch.own[1], 0), (batch.own[2], 0)])
    batch.tail.set_lengths([None, 8, 3], 1)
    before = pool.by_block.clone()
    query, key_value = forest.draw(1, 3, 2, 16), forest.draw(2, 3, 2, 1, 16)
    asked, stored = forest._token(0, 3, 0)
    query[2], key_value[2] = asked[2], stored[2]
    found = batch.view.attend(0, query, key_value)
    assert torch.equal(found[2], alone)
    assert torch.equal(pool.by_block[: pool.num_blocks], before[: pool.num_blocks])
    assert not torch.equal(pool.by_block[pool.num_blocks], before[pool.num_blocks])
    pool.free(beyond)
    batch.close()


# --- company ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_do_not_depend_on_its_company(make_small, kernels, name):
    """Other rows beside it, in another order, padded, more of them under the same segments."""
    forest = make_small(3, rows=4, seed=2)
    trunk = forest.chain(*[50] * 14)
    forest.paths += [trunk, trunk[:12], (*trunk[:13], PathPart(trunk[13].segment, 9))]
    batches, held = ([4], [1], [6, 2, 5, 5]), {0: 31, 1: 100, 2: 3, 3: 255, 4: 64, 5: 16}
    forest.assert_bits(kernels(name), batches, 1, [1, 40, 7, 16, 17, 3, 8], held)


def test_windows_and_sinks_follow_from_a_rows_own_path(make_sunk, kernels):
    """What lies before every window may be left out; and no bit depends on the batch."""
    forest, held = make_sunk("all"), {1: 3, 2: 70, 4: 17}
    forest.assert_bits(kernels("triton-tree"), [[3], [5, 2], [4, 1, 0]], 2, [9] * 6, held)
    forest = make_sunk("window")
    whole = forest.decode(kernels("triton-tree"), range(6), 2)
    forest.paths = [path[-1:] if path and path[-1].visible >= 16 else path for path in forest.paths]
    assert any(len(path) == 1 for path in forest.paths)
    found = forest.decode(kernels("triton-tree"), range(6), 2)
    assert largest_difference(found, whole) < 1e-5


def test_dropped_rows_leave_the_others_alone_when_their_blocks_are_used_again(make_small, kernels):
    forest = make_small(3)
    store = forest.store
    ((own, _, _),) = part = forest.chain(20)
    forest.paths = [forest.paths[0], (*forest.paths[0], *part)]
    first, second = (step[0] for step in forest.decode(kernels("triton-tree"), [0], 2))
    batch = Batch(forest, kernels("triton-tree"))
    batch.arrange([], [0, 1])
    assert torch.equal(batch.token()[0][:1], first)
    batch.view.deactivate_rows([1])
    blocks = list(own.blocks)
    store.free(own)
    store.pool.storage[blocks] = 1e4
    batch.held = [0, 0]
    assert torch.equal(batch.token()[0][:1], first)
    batch.arrange([0])
    assert torch.equal(batch.token()[0], second)
    batch.close()
    assert store.scratch.used_bytes == 0


def test_a_copy_may_go_with_the_row_that_read_it(make_small, kernels):
    """Two rows, two copies; one row stops, the second copy is evicted: the other row moves up."""
    forest = make_small(1, rows=3)
    store, path = forest.store, forest.chain(20)
    segment = path[0].segment
    segment.copies.append(store.pool.allocate(store.device.blocks_for(20)))
    store.copy_on_device(segment.copies[0], segment.copies[1])
    forest.paths = [path] * 2
    batch = Batch(forest, kernels("triton-dense"))
    batch.arrange([], [0, 1])
    first = batch.token()[0]
    batch.view.deactivate_rows([0])
    store.pool.storage[segment.copies.pop()] = 1e4
    batch.held = [0, 0]
    assert torch.equal(batch.token()[0][1], first[1])
    batch.close()
