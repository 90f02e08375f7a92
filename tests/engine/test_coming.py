"""Rows whose KV comes while others run: when they do, and that nothing else changes."""

from dataclasses import replace
from math import inf

import pytest

from beamwright.engine.capacity import WorkingMemory
from beamwright.engine.queue import Coming
from beamwright.plan.machines import PassCosts

COSTS = PassCosts(weights_s=1.0, link_bandwidth=1.0)


class Store:
    """What `Coming` asks of a cache and of the room. lacking: bytes that have to be loaded."""

    def __init__(self, lacking):
        self.device = self
        self.num_blocks, self.bytes_per_block = 4, 1
        self.lacking, self.parks, self.fetched = lacking, True, 0

    def read_by(self, rows):
        return rows

    def lacking_bytes(self, needs):
        return self.lacking

    def load_ahead(self, needs):
        self.fetched += 1


class Waiting:
    """A row that may hold what it reads."""

    holds = False

    def hold(self):
        self.holds = True

    def let_go(self):
        self.holds = False


@pytest.mark.parametrize(
    ("lacking", "num_running", "passes"),
    [
        (0, 3, 0),  # all is there
        (2.1, 3, 2),  # and the rest is waited for: another pass would cost a quarter of one
        (2.9, 3, 3),
        (0.1, 3, 0),  # sooner waited for than missed
        (0.1, 99, 1),
        (5, 0, 0),  # nobody is there to run meanwhile
    ],
)
def test_others_run_as_long_as_that_is_cheaper(lacking, num_running, passes):
    store = Store(lacking)
    coming = Coming(store, store, COSTS)
    row = Waiting()
    assert coming.begin([row], num_running) is (passes > 0)
    assert row.holds is bool(store.fetched) is (passes > 0)
    assert not passes or coming.passes == passes


def test_only_rows_that_park_come_and_one_lot_at_a_time():
    store, rows = Store(5), [Waiting(), Waiting()]
    coming = Coming(store, store, COSTS)
    assert coming.begin(rows[:1], 3)
    assert not coming.begin(rows[1:], 3)
    assert coming.first(rows) == rows[:1]  # the other one comes later
    assert coming.first(rows[::-1]) == rows[::-1]
    assert not rows[0].holds
    assert not coming.drop()
    store.parks = False
    assert not coming.begin(rows, 3)
    assert not Coming(store, store, None).begin(rows, 3)
    assert not Coming(store, store, replace(COSTS, link_bandwidth=inf)).begin(rows, 3)


def test_a_smaller_batch_pays_by_what_it_spares():
    assert not WorkingMemory().pays(50, 64)
    assert WorkingMemory().pays(48, 64)
    slow = WorkingMemory(costs=PassCosts(weights_s=0.0, row_s=0.001))
    assert slow.pays(56, 64)
    assert not slow.pays(57, 64)
    assert not slow.pays(0, 64)
    assert slow.enough(64, 64, 64) == 4
    assert WorkingMemory().enough(64, 64, 64) == 16
