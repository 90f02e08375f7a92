"""Blocks of KV and states go to the host and come back in any order: every one as it went."""

import random

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

KV = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32, block_tokens=4)
SIZE = 70  # of a state: more than two blocks
STATES = StateLayout(
    [
        StateTensor(1, "recurrent", (SIZE,), torch.float32),
        StateTensor(1, "conv", (3,), torch.float32),
    ]
)
MOST_SEGMENTS, DEVICE_BLOCKS, HOST_BLOCKS = 24, 40, 400


class Traffic:
    """Segments that grow, leave, come back and end as a coin says; each knows what it holds."""

    def __init__(self, link, seed):
        self.rng, self.numbers = random.Random(seed), iter(range(1 << 30))
        device, host = (
            BlockPool([KV], ByteBudget(count * KV.bytes_per_block), states=STATES)
            for count in (DEVICE_BLOCKS, HOST_BLOCKS)
        )
        self.store = SegmentStore(device, HostTier(host, link))
        self.compared = check_transfers(self.store)
        self.held = {}

    def step(self):
        actions = [self.grow] * 3 + [self.read] * 3 + [self.leave, self.ahead, self.back, self.end]
        self.rng.choice(actions)()

    def pick(self):
        return self.rng.choice(list(self.held)) if self.held else None

    def grow(self):
        """A row begins, or goes on where it was preempted, and writes its state in place."""
        segment = self.pick() if self.rng.random() < 0.5 else None
        if segment is None:
            if len(self.held) == MOST_SEGMENTS:
                return
            segment = self.store.create(str(next(self.numbers)))
            self.held[segment] = torch.zeros(0)
        count = self.rng.randint(1, 6)
        try:
            with self.store.lease(dict.fromkeys(segment.group_segments, 1)):
                values = torch.full((count,), float(next(self.numbers) % 65521))
                begins = segment.group_segments[-1] if segment.length else None
                rows = self.store.state_rows([begins], [segment])
                before = rows.read(1)["recurrent"]
                assert torch.equal(before, self.state(segment))
                self.store.append(
                    [segment], [values[:, None, None, None, None].expand(-1, 1, 2, 1, 4)]
                )
                self.held[segment] = torch.cat([self.held[segment], values])
                rows.write(1, {"recurrent": self.state(segment), "conv": torch.zeros(1, 3)})
        except CapacityError:
            self.end(segment)

    def state(self, segment):
        """What its state has to be [1, SIZE]."""
        return self.held[segment].sum() + torch.arange(SIZE)[None] * bool(segment.length)

    def read(self):
        some = self.rng.sample(list(self.held), min(len(self.held), self.rng.randint(1, 4)))
        needs = {
            each: 1 for s in some for each in s.group_segments if each.length and not each.gone
        }
        try:
            lease = self.store.lease(needs)
        except CapacityError:
            return
        with lease:
            for segment in some:
                if segment in needs:
                    found = self.store.gather(segment, segment.length)[0, 0, :, 0, 0]
                    assert torch.equal(found, self.held[segment])

    def leave(self):
        self.store.evict_all()

    def ahead(self):
        if (segment := self.pick()) is not None:
            self.store.prefetch(dict.fromkeys(segment.group_segments, 1))

    def back(self):
        if (segment := self.pick()) is not None:
            self.store.write_back([segment], sealed=self.rng.random() < 0.5)

    def end(self, segment=None):
        if (segment := segment or self.pick()) is not None:
            del self.held[segment]
            self.store.free(segment)


@pytest.mark.parametrize(
    "num_trips", [4_000, pytest.param(1_000_000, marks=pytest.mark.nightly)], ids=str
)
def test_what_comes_back_is_what_went(num_trips):
    link = StreamLink(HostStreams())
    traffic = Traffic(link, 0)
    number = 0
    while len(traffic.compared) < num_trips:
        traffic.step()
        number += 1
        if number % 64 == 0:
            traffic.store.check()
    for segment in list(traffic.held):
        traffic.end(segment)
    traffic.store.check()
    assert traffic.store.pool.budget.used_bytes == 0
    link.close()


def test_a_bit_that_has_flipped_is_found():
    link = StreamLink(HostStreams())
    traffic = Traffic(link, 1)
    while not traffic.held:
        traffic.grow()
    segment = traffic.pick()
    traffic.store.evict_all()
    traffic.store.host.ledger.by_block[segment.group_segments[-1].host_blocks[-1], 3] ^= 4
    with pytest.raises(AssertionError, match=r"'\d+' came back changed"):
        traffic.store.lease({segment.group_segments[-1]: 1})
    link.close()
