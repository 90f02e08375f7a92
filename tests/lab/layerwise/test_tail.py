"""A layered tail: what it refuses, and what it holds. What is read of it, the views' tests show."""

from types import SimpleNamespace

import pytest
import torch

from beamwright.kv.link import StreamLink
from beamwright.kv.pool import KVLayout, ScratchMeter
from beamwright_lab.baselines.layerwise.tail import LayeredTail
from streams import EagerStreams

CAPACITY = 50


@pytest.fixture
def layout():
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32, block_tokens=4)


def filled(layout, num_rows, num_tokens, scratch=None):
    """A tail and what was written: [tokens, layers, rows, 2, kv_heads, head_dim]."""
    store = SimpleNamespace(
        kv=SimpleNamespace(layout=layout),
        scratch=scratch or ScratchMeter(),
        compute_device=torch.device("cpu"),
        link=StreamLink(EagerStreams()),
    )
    tail = LayeredTail(store, CAPACITY)
    tail.arrange([], num_rows)
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, layout.num_layers, num_rows, 2, layout.num_kv_heads, layout.head_dim)
    written = torch.randn(shape, generator=generator)
    for number, token in enumerate(written):
        tail.begin([number] * num_rows, 1)
        tail.make_room()
        for layer, key_value in enumerate(token):
            tail.write(layer, key_value)
        tail.advance()
    return tail, written


def test_rows_of_other_lengths_are_a_bug(layout):
    """They would be written to the same place."""
    tail, _ = filled(layout, 3, 5)
    tail.begin([5, None, 5], 16)
    for lengths in ([5, 0, 5], [4, 4, 4], [None, 6, 6]):
        with pytest.raises(AssertionError, match="begin together"):
            tail.begin(lengths, 1)
    with pytest.raises(AssertionError, match="parked"):
        tail.restore(0, torch.zeros(2, 2, 1, 3, 5))


@pytest.mark.parametrize("leave", [LayeredTail.close, LayeredTail.release])
def test_its_bytes_are_counted_exactly_until_it_is_closed(layout, leave):
    scratch = ScratchMeter()
    tail, _ = filled(layout, 3, 40, scratch)
    assert scratch.used_bytes == tail.num_bytes == CAPACITY * 3 * layout.bytes_per_token
    tail.arrange([0], 1)
    assert scratch.used_bytes == tail.num_bytes == CAPACITY * layout.bytes_per_token
    leave(tail)
    leave(tail)
    assert scratch.used_bytes == tail.num_bytes == 0
    assert scratch.peak_bytes > 0
