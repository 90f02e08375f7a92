"""Layer-wise offloading over side streams: where layers reside as they move, and no races."""

import pytest
import torch

from beamwright.attention.buckets import Entry
from beamwright.kv.link import StreamLink
from beamwright.kv.streams import CudaStreams
from beamwright.protocols import Direction
from beamwright_lab.baselines.layerwise.streams import LayerStreams
from lab.layerwise.drives import LAYERS, TOKENS, layered, pair, same
from streams import EagerStreams, LateStreams

NAMES = pytest.mark.parametrize("name", ["dense", "tree"])


# --- races: each test fails where its event is missing ---------------------------------------


@NAMES
def test_compute_waits_for_what_it_reads(make_forest, name):
    """Copies that run as late as they may; without the wait, attention reads an old buffer."""
    for careless in (False, True):
        streams = LateStreams(careless=careless)
        link = StreamLink(streams)
        plain, device = pair(make_forest, name, link, 3.5, dtype=torch.float32)
        equal = same(plain.run(4).contexts, device.run(4).contexts)
        assert equal is not careless


def buffers_read(make_forest, streams):
    """What compute reads layer by layer if it runs long after everything was queued."""
    link = StreamLink(streams)
    forest = layered(make_forest(2, layers=LAYERS, dtype=torch.float32), link)
    store, (path, *_) = forest.store, forest.paths
    layers = LayerStreams(store, 1)
    copy = layers.hold(store, [Entry(path, (0,))], 64 * len(path))
    layers.begin(0, 2)  # two layers resident, four streamed
    streams.run_compute()
    seen = {}

    def read(layer):
        seen[layer] = copy.layer(layer).clone()

    for layer in range(LAYERS):
        layers.ready(layer)
        streams.queue(lambda layer=layer: read(layer))
        layers.done(layer)
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


def test_the_stall_is_what_the_device_says(make_forest):
    streams = LateStreams()
    link = StreamLink(streams)
    _, device = pair(make_forest, "tree", link, 3.5, dtype=torch.float32)
    device.run(TOKENS)
    assert len(streams.held) > TOKENS * 4
    assert device.store.stall_s > link.held_back_s == pytest.approx(0.01 * len(streams.held))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@NAMES
def test_a_card_s_streams_change_no_context(make_forest, name):
    """Over real events; twenty tokens, so that the tail grows under way."""
    link = StreamLink(CudaStreams(torch.device("cuda")))
    shape = {"dtype": torch.float32, "device": "cuda"}
    plain, device = pair(make_forest, name, link, 3.9, **shape)
    expected, found = plain.run(20).contexts, device.run(20).contexts
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one, two)
    assert link.bytes_moved[Direction.H2D] == device.moved_bytes()
    link.close()
    assert device.store.stall_s >= 0.0
