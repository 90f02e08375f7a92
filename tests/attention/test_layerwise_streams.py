"""Layer-wise offloading over side streams: the same bits and bytes as over the copier, no races."""

import pytest
import torch

from attention.drives import FIRST_ROWS, FLUSH, KEEP, LAYERS, TOKENS, Drive, layered, pair, same
from beamwright.attention import LayerwiseAttention, make_attention
from beamwright.attention.layers import Entry
from beamwright.attention.offload import Offload
from beamwright.attention.streams import LayerStreams
from beamwright.kv import ByteBudget, CopierLink, CudaStreams, Direction, Piece, StreamLink
from streams import EagerStreams, LateStreams

NAMES = pytest.mark.parametrize("name", ["dense", "tree"])


@pytest.fixture
def copier():
    link = CopierLink()
    yield link
    link.close()


def twin(make_forest, name, copier, fit, streams=None, **shape):
    """The same rows alone, over the copier, and over streams."""
    plain, host, _ = pair(make_forest, name, copier, fit, **shape)
    link = StreamLink(streams or LateStreams())
    other, device, backend = pair(make_forest, name, link, fit, **shape)
    other.close()
    return plain, host, device, backend, link


@NAMES
@pytest.mark.parametrize("fit", [2.2, 3.3, 5.5, 20])
def test_streaming_changes_no_bit_and_moves_what_the_copier_moves(make_forest, copier, name, fit):
    shape = {"dtype": torch.float32, "kv_heads": 2, "group": 3}
    plain, host, device, backend, link = twin(make_forest, name, copier, fit, **shape)
    expected = plain.run(keep=KEEP, flush=FLUSH).contexts
    host.run(keep=KEEP, flush=FLUSH)
    assert same(expected, device.run(keep=KEEP, flush=FLUSH).contexts)
    assert dict(link.bytes_moved) == dict(copier.bytes_moved)
    assert device.resident == host.resident
    assert backend.streamed_layers == sum(LAYERS - resident for resident in host.resident)
    assert backend.budget.used_bytes == backend.padding.used_bytes == 0
    assert device.store.scratch.used_bytes == 0
    for mine, other in zip(plain.own, device.own, strict=True):
        held = plain.store.gather(mine, mine.length)
        assert torch.equal(held, device.store.gather(other, other.length))


@NAMES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(make_forest, copier, name, dtype):
    plain, host, device, _, link = twin(make_forest, name, copier, 3.5, dtype=dtype)
    assert same(plain.run(3).contexts, device.run(3).contexts)
    host.run(3)
    assert dict(link.bytes_moved) == dict(copier.bytes_moved)


@NAMES
def test_more_tokens_than_the_first_tail_allocation(make_forest, copier, name):
    plain, host, device, _, link = twin(make_forest, name, copier, 3.9, dtype=torch.float32)
    assert same(plain.run(20).contexts, device.run(20).contexts)
    host.run(20)
    assert dict(link.bytes_moved) == dict(copier.bytes_moved)


@NAMES
def test_layers_leave_the_device_as_rows_grow_and_come_back_as_rows_go(make_forest, copier, name):
    keep = {8: [1, 2, 3, 4]}
    plain, host, device, _, link = twin(make_forest, name, copier, 5.01, dtype=torch.float32)
    assert same(plain.run(12, keep=keep).contexts, device.run(12, keep=keep).contexts)
    host.run(12, keep=keep)
    assert dict(link.bytes_moved) == dict(copier.bytes_moved)
    assert device.resident[0] > min(device.resident[1:8])
    assert device.resident[8] > device.resident[7]


@NAMES
def test_views_that_follow_each_other_with_other_rows_read_what_is_true(make_forest, copier, name):
    """Segments that nobody read while layers came and went; each view is held against the oracle
    of the same layout, which keeps everything in one place."""
    plain, _, device, backend, _ = twin(make_forest, name, copier, 4.2, dtype=torch.float32)
    plain.close()
    device.close()
    for rows in ([0, 1], range(FIRST_ROWS), [2], range(11), [4, 5, 6], [0, 1]):
        one = Drive(plain.forest, plain.attention, rows)
        two = Drive(device.forest, backend, rows, budget_bytes=backend.budget.total_bytes)
        assert same(one.run(5).contexts, two.run(5).contexts)


@NAMES
def test_padding_rows_are_neither_streamed_nor_counted(make_forest, copier, name):
    shape = {"real": 6, "dtype": torch.float32}
    plain, host, device, backend, link = twin(make_forest, name, copier, 3.2, **shape)
    plain.real = 6
    assert same(plain.run(4).contexts, device.run(4).contexts)
    host.run(4)
    assert dict(link.bytes_moved) == dict(copier.bytes_moved)
    assert backend.padding.peak_bytes > 0


@NAMES
@pytest.mark.parametrize("fit", [2.2, 3.5, 20])
def test_prefill_streams_each_layer_once(make_forest, copier, name, fit):
    rows, lengths = list(range(7)), [1, 5, 16, 17, 33, 2, 8]
    forest = make_forest(4, layers=LAYERS, dtype=torch.float32, seed=2)
    token_bytes = forest.layout.bytes_per_token // LAYERS
    paths = [forest.paths[row] for row in rows]
    parts = [part for path in paths for part in path]
    distinct = {(id(p.segment), p.visible): p.visible for p in parts}
    held = sum(p.visible for p in parts) if name == "dense" else sum(distinct.values())
    budget = int(fit * (held + sum(lengths)) * token_bytes)
    link = StreamLink(LateStreams())
    other = layered(forest, link)
    over = [
        (forest, LayerwiseAttention(make_attention(name), ByteBudget(budget), copier)),
        (other, LayerwiseAttention(make_attention(name), ByteBudget(budget), link)),
    ]
    found = [each.prefill(backend, rows, lengths, num_padding=6) for each, backend in over]
    assert same(found[0], found[1])
    assert same(found[0], forest.prefill(name, rows, lengths, num_padding=6))
    assert dict(link.bytes_moved) == dict(copier.bytes_moved)


def test_a_prefill_s_tokens_stand_where_their_layers_do(make_forest):
    """The streamed layers' tokens come from the link, the others from the device."""
    link = StreamLink(LateStreams())
    forest = layered(make_forest(2, layers=LAYERS, dtype=torch.float32), link)
    store, (path, *_) = forest.store, forest.paths
    drive = Drive(forest, make_attention("tree"), [0])
    drive.close()
    budget = ByteBudget(int(3.5 * sum(p.visible for p in path) * drive.token_bytes) + 5000)
    backend = LayerwiseAttention(make_attention("tree"), budget, link)
    view = backend.prefill_view(store, [path], [3])
    fresh = []
    for layer in range(LAYERS):
        query, key_value = forest._token(0, layer, layer)
        fresh.append(key_value[:3])
        view.attend(layer, query[:3], key_value[:3])
    view.close()
    mine = store.create()
    store.append([mine], [torch.stack(fresh, dim=1)])
    assert 0 < store.near_layers(mine) < LAYERS
    whole = store.gather(mine, 3).permute(2, 0, 1, 3, 4)
    assert torch.equal(whole, torch.stack(fresh, dim=1))


# --- races: each test fails where its event is missing ---------------------------------------


@NAMES
def test_compute_waits_for_what_it_reads(make_forest, copier, name):
    """Copies that run as late as they may; without the wait, attention reads an old buffer."""
    for careless in (False, True):
        streams = LateStreams(careless=careless)
        plain, _, device, _, _ = twin(make_forest, name, copier, 3.5, streams, dtype=torch.float32)
        equal = same(plain.run(4).contexts, device.run(4).contexts)
        assert equal is not careless


def buffers_read(make_forest, streams):
    """What compute reads layer by layer if it runs long after everything was queued."""
    link = StreamLink(streams)
    forest = layered(make_forest(2, layers=LAYERS, dtype=torch.float32), link)
    store, (path, *_) = forest.store, forest.paths
    budget = ByteBudget(LAYERS * 1000 * forest.layout.bytes_per_token)
    offload = Offload(budget, link)
    layers = LayerStreams(offload, forest.layout, 1)
    copy = layers.hold(store, [Entry(path, (0,))], 64 * len(path))
    offload.home.note(layers.copies, LAYERS)
    layers.held_bytes()
    layers.begin(0, 2)  # two layers resident, four streamed
    streams.run_compute()
    seen = {}

    def read(layer):
        seen[layer] = copy.layer(layer).clone()

    for layer in range(LAYERS):
        layers.ready(layer)
        streams.queue(lambda layer=layer: read(layer))
        layers.done(layer, another_token=False)
    streams.run_compute()
    parts = [store.gather(part.segment, part.visible) for part in path]
    whole = torch.cat(parts, dim=2)
    tokens = whole.shape[2]
    return [
        torch.equal(seen[layer][:, 0, :, :tokens], whole[layer].transpose(1, 2))
        for layer in range(LAYERS)
    ]


def test_a_buffer_is_not_overwritten_before_its_last_reader(make_forest):
    """Copies that run as early as they may, and compute that lags behind."""
    assert all(buffers_read(make_forest, EagerStreams()))
    careless = buffers_read(make_forest, EagerStreams(careless=True))
    assert careless[:2] == [True, True], "resident layers have no buffer"
    assert careless[2:] == [False, False, True, True], "the next two layers were in the buffers"


def sent_home(make_forest, streams):
    """What reaches the host of a token that compute writes after it was told to go home."""
    link = StreamLink(streams)
    forest = layered(make_forest(1, layers=LAYERS, dtype=torch.float32), link)
    layers = LayerStreams(Offload(ByteBudget(1 << 40), link), forest.layout, 1)
    layers.hold(forest.store, [Entry(forest.paths[0], (0,))], 64)
    written, home = torch.zeros(8), torch.full((8,), 9.0)
    streams.queue(lambda: written.fill_(1.0))
    transfer = layers.store([Piece(home, written, 32)])
    link.wait([transfer])
    return home.tolist()


def test_a_token_goes_home_after_it_was_written(make_forest):
    assert sent_home(make_forest, EagerStreams()) == [1.0] * 8
    assert sent_home(make_forest, EagerStreams(careless=True)) == [0.0] * 8


class LostOrder(LateStreams):
    """Compute is held back by what comes to the device, and not by what goes home."""

    def hold_back(self, copied):
        if copied.direction is Direction.H2D:
            return super().hold_back(copied)
        return EagerStreams.hold_back(self, copied)


@NAMES
def test_a_token_is_fetched_again_after_it_went_home(make_forest, copier, name):
    """The tail's next fetch reads on the host what the other stream has still to bring there."""
    plain, _, device, _, _ = twin(make_forest, name, copier, 3.5, LostOrder(), dtype=torch.float32)
    assert not same(plain.run(4).contexts, device.run(4).contexts)


def test_the_stall_is_what_the_device_says(make_forest, copier):
    streams = LateStreams()
    _, _, device, backend, link = twin(
        make_forest, "tree", copier, 3.5, streams, dtype=torch.float32
    )
    device.run(TOKENS)
    assert len(streams.held) > TOKENS * 4
    assert backend.stall_s > link.held_back_s == pytest.approx(0.01 * len(streams.held))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@NAMES
def test_a_card_s_streams_change_no_context(make_forest, name):
    """Over real events; twenty tokens, so that the tail grows under way."""
    link = StreamLink(CudaStreams(torch.device("cuda")))
    shape = {"dtype": torch.float32, "device": "cuda"}
    plain, device, backend = pair(make_forest, name, link, 3.9, **shape)
    expected, found = plain.run(20).contexts, device.run(20).contexts
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one, two)
    assert link.bytes_moved[Direction.H2D] == device.streamed_bytes() + backend.discarded_bytes
    link.close()
    assert backend.stall_s >= 0.0
