import pytest
import torch

from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.store import SegmentStore


@pytest.fixture
def layout():
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32, block_tokens=4)


@pytest.fixture
def make_store(layout):
    def make(num_blocks=16):
        budget = ByteBudget(num_blocks * layout.bytes_per_block)
        return SegmentStore(BlockPool(layout, budget))

    return make
