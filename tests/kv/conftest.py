"""Small stores, and segments of random KV."""

import pytest
import torch

from beamwright.kv.host import HostTier
from beamwright.kv.link import StreamLink
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import HostStreams

HOST_OPTIONS = ("recompute", "share_loads")


@pytest.fixture
def layout():
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32, block_tokens=4)


@pytest.fixture
def tiers(layout):
    """Stores of so many device and host blocks, four tokens each; without a host where it is 0."""
    links = []

    def make(device=6, host=64, bandwidth=None, budget=None, shared=None, **options):
        size, tier = layout.bytes_per_block, None
        host_options = {name: options.pop(name) for name in HOST_OPTIONS if name in options}
        if host:
            links.append(StreamLink(HostStreams(), bandwidth))
            host_pool = BlockPool([layout], ByteBudget(host * size, "host KV budget"))
            tier = HostTier(host_pool, links[-1], **host_options)
        pool = BlockPool([layout], budget or ByteBudget(device * size), shared=shared)
        return SegmentStore(pool, tier, **options)

    yield make
    for link in links:
        link.close()


def values_of(layout, num_tokens, seed=0):
    """Random KV, as `append` wants it."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return torch.randn(shape, generator=generator)


def filled(store, num_tokens, seed=0):
    """A segment of random KV, and that KV as `gather` gives it."""
    values = values_of(store.pool.layout, num_tokens, seed)
    segment = store.create(str(seed))
    store.append([segment], [values])
    store.check()
    return segment, values.permute(1, 2, 0, 3, 4)
