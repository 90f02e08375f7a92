"""Rows whose KV comes from the host while others run.

A row that joins waits for what it lacks, and so does everybody else. Where that takes longer than
those that run lose by a few passes without it, they get these passes first. So many are known
beforehand, from bytes and the cost model: never when a copy has ended, so equal runs stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from beamwright.engine.capacity import Capacity
from beamwright.engine.row import Row
from beamwright.kv.cache import CacheManager
from beamwright.plan.machines import PassCosts


class Coming:
    """The rows that wait in front and hold on the device what they read, there or on its way.

    passes: that the others run before these join.
    """

    def __init__(self, cache: CacheManager, capacity: Capacity, costs: PassCosts | None) -> None:
        self._cache, self._capacity, self._costs = cache, capacity, costs
        self.rows, self.passes = list[Row](), 0

    def begin(self, rows: Sequence[Row], num_running: int) -> bool:
        """Load what these rows lack, if they park and others are to run meanwhile; True if so.

        Raises:
            CapacityError: if it does not fit; LinkError: if the link has failed.
        """
        parks = self._capacity.most_ahead is not None
        if self.rows or not num_running or not parks or self._costs is None:
            return False
        device, costs, needs = self._cache.device, self._costs, self._capacity.read_by(rows)
        kv_bytes = device.num_blocks * device.bytes_per_block  # rows park: about all is read
        pass_s = max(costs.seconds(num_running), costs.weights_s + kv_bytes * costs.byte_s)
        load = self._cache.lacking_bytes(needs) / costs.link_bandwidth / pass_s
        missing = len(rows) / (len(rows) + num_running)
        choices = 0, int(load), int(load) + 1
        self.passes = min(choices, key=lambda n: n * missing + max(0.0, load - n))
        if not self.passes:
            return False
        self._cache.load_ahead(needs)
        for row in rows:
            row.hold()
        self.rows = list(rows)
        return True

    def first(self, rows: list[Row]) -> list[Row]:
        """Of those in front, the ones that have come; all, and none comes any more, if others wait
        before them."""
        ready = list(takewhile(self.rows.__contains__, rows))
        if not ready:
            self.drop()
        return ready or rows

    def drop(self) -> bool:
        """They hold nothing any more; False if none came."""
        rows, self.rows = self.rows, []
        for row in rows:
            row.let_go()
        return bool(rows)

    def forget(self, row: Row) -> None:
        """It has let go by itself."""
        self.rows = [each for each in self.rows if each is not row]
