"""Random traffic between two tiers: every segment reads as it was written, no block is lost."""

import random
from contextlib import suppress

import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.kv.host import HostTier
from beamwright.kv.link import StreamLink
from beamwright.kv.pool import BlockPool, ByteBudget, KVLayout
from beamwright.kv.states import StateLayout, StateTensor
from beamwright.kv.store import SegmentStore
from beamwright.kv.streams import HostStreams
from checksums import check_transfers

KV = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32, block_tokens=4)
SIZE = 70  # of a state: more than two blocks
STATES = StateLayout(
    [
        StateTensor(1, "recurrent", (SIZE,), torch.float32),
        StateTensor(1, "conv", (3,), torch.float32),
    ]
)
MOST_SEGMENTS, DEVICE_BLOCKS, HOST_BLOCKS = 24, 40, 400


class Traffic:
    """Segments that grow, leave, come back and end as a coin says; each knows what it holds.

    states: of recurrent layers, beside KV. most_copies: that a lease asks for.
    """

    def __init__(self, seed, states=STATES, most_copies=1, bandwidth=None):
        self.rng, self.numbers = random.Random(seed), iter(range(1 << 30))
        device, host = (
            BlockPool([KV], ByteBudget(count * KV.bytes_per_block), states=states)
            for count in (DEVICE_BLOCKS, HOST_BLOCKS)
        )
        self.link = StreamLink(HostStreams(), bandwidth)
        self.states, self.most_copies = states, most_copies
        tier = HostTier(host, self.link)
        self.store = SegmentStore(device, tier, copies_per_beam=most_copies > 1)
        self.compared = check_transfers(self.store)
        self.held = {}

    def step(self):
        actions = [self.grow] * 3 + [self.read] * 3 + [self.leave, self.ahead, self.back, self.end]
        with suppress(CapacityError):
            self.rng.choice(actions)()

    def some(self, most=4):
        return self.rng.sample(list(self.held), min(len(self.held), self.rng.randint(1, most)))

    def grow(self):
        """A row begins, or goes on where it was preempted, and writes its state in place."""
        segment = next(iter(self.some(1)), None) if self.rng.random() < 0.5 else None
        if segment is None:
            if len(self.held) == MOST_SEGMENTS:
                return
            segment = self.store.create(str(next(self.numbers)))
            self.held[segment] = torch.zeros(0)
        count, copies = self.rng.randint(1, 6), self.rng.randint(1, self.most_copies)
        try:
            with self.store.lease(dict.fromkeys(segment.group_segments, copies)):
                values = torch.full((count,), float(next(self.numbers) % 65521))
                if self.states:
                    begins = segment.group_segments[-1] if segment.length else None
                    rows = self.store.make_row_states([begins], [segment])
                    assert torch.equal(rows.read(1)["recurrent"], self.state(segment))
                kv = values[:, None, None, None, None].expand(-1, 2, 2, 1, 4)
                self.store.append([segment], [kv])
                self.held[segment] = torch.cat([self.held[segment], values])
                if self.states:
                    rows.write(1, {"recurrent": self.state(segment), "conv": torch.zeros(1, 3)})
        except CapacityError:
            self.end(segment)

    def state(self, segment):
        """What its state has to be [1, SIZE]."""
        return self.held[segment].sum() + torch.arange(SIZE)[None] * bool(segment.length)

    def read(self):
        some, copies = self.some(), self.rng.randint(1, self.most_copies)
        every = (each for s in some for each in s.group_segments)
        needs = dict.fromkeys((e for e in every if e.length and not e.out_of_window), copies)
        with self.store.lease(needs):
            for segment in filter(needs.get, some):
                assert len(segment.copies) >= copies
                seen = self.rng.randint(1, segment.length)
                for copy in range(len(segment.copies)):
                    found = self.store.gather(segment, seen, copy)
                    expected = self.held[segment][:seen, None, None]
                    assert torch.equal(found, expected.expand(2, 2, -1, 1, 4))

    def leave(self):
        self.store.evict_all()

    def ahead(self):
        self.store.announce_uses([[segment] for segment in self.some()])
        for segment in self.some(1):
            self.store.prefetch_group(dict.fromkeys(segment.group_segments, 1))

    def back(self):
        self.store.write_back(self.some(1), sealed=self.rng.random() < 0.5)

    def end(self, segment=None):
        for each in [segment] if segment else self.some(1):
            del self.held[each]
            self.store.free(each)

    def check(self):
        self.store.check()
        assert all(each.pins == 0 for s in self.held for each in s.group_segments)
        assert all(s.length == len(values) for s, values in self.held.items())

    def close(self):
        for segment in list(self.held):
            self.end(segment)
        self.check()
        tiers = self.store.pool.budget, self.store.host.ledger.budget
        assert (self.store.num_segments, *(tier.used_bytes for tier in tiers)) == (0, 0, 0)
        self.link.close()


@pytest.mark.parametrize(
    ("num_trips", "how"),
    [
        (2_500, {}),
        (1_500, {"states": None, "most_copies": 2}),
        (400, {"states": None, "bandwidth": 20_000_000}),
        pytest.param(1_000_000, {}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_what_comes_back_is_what_went(num_trips, how):
    traffic, number = Traffic(0, **how), 0
    while len(traffic.compared) < num_trips:
        traffic.step()
        number += 1
        if number % 16 == 0:
            traffic.check()
    traffic.close()


def test_a_bit_that_has_flipped_is_found():
    traffic = Traffic(1)
    while not traffic.held:
        traffic.grow()
    (segment,) = traffic.some(1)
    traffic.store.evict_all()
    traffic.store.host.ledger.by_block[segment.group_segments[-1].host_blocks[-1], 3] ^= 4
    with pytest.raises(AssertionError, match=r"'\d+' came back changed"):
        traffic.store.lease({segment.group_segments[-1]: 1})
    traffic.link.close()
