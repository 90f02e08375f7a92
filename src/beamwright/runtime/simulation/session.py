"""A simulated group: its rows, token by token, with the block traffic of the real session.

Goes as `runtime.decode` and `models.DecodeSession` go: the newest tokens stand in a tail; whole
blocks are stored, and sent home, as soon as they are full; the rest when the step is complete; a
row for which no block can be found is parked. Between two such moments nothing can happen, so the
clock moves over them in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamwright.cost import Layout
from beamwright.errors import CapacityError
from beamwright.kv import Lease, Segment
from beamwright.models.decoder import padded_rows
from beamwright.runtime.batch import worth_compacting
from beamwright.runtime.simulation.clock import VirtualClock
from beamwright.runtime.simulation.costs import DeviceCosts
from beamwright.runtime.simulation.residency import SimulatedResidency
from beamwright.tree import Node, StopReason

Needs = Callable[[Sequence[Node]], dict[Segment, int]]


@dataclass(eq=False)
class SimulatedRow:
    """A beam's step so far.

    tokens, stop: what the step will be. drawn: tokens so far; the last of them has no KV yet.
    """

    node: Node
    segment: Segment
    tokens: int
    stop: StopReason
    drawn: int = 0

    @property
    def complete(self) -> bool:
        """True once all tokens are drawn."""
        return self.drawn == self.tokens


@dataclass(frozen=True)
class Machine:
    """What a session runs on. tail_tokens: see `protocols.AttentionBackend`."""

    residency: SimulatedResidency
    clock: VirtualClock
    costs: DeviceCosts
    tail_tokens: int


class SimulatedSession:
    """Rows that are decoded together. All of them have drawn equally many tokens.

    path_needs: device copies of what rows of these nodes read, their own steps left out.
    saw: told the length of every step that is complete.
    """

    def __init__(
        self,
        machine: Machine,
        rows: Sequence[SimulatedRow],
        lease: Lease,
        path_needs: Needs,
        saw: Callable[[int], None],
        *,
        write_back: bool,
    ) -> None:
        self._machine, self._lease = machine, lease
        self._residency = machine.residency
        self._path_needs, self._saw, self._write_back = path_needs, saw, write_back
        self._active = list(rows)
        self._batch = list(rows)
        self._num_rows = padded_rows(len(rows))
        lease.add({row.segment: 1 for row in rows})
        self._stored = self._forwarded = rows[0].segment.length
        self._count_paths()
        self._open()

    def run(self) -> None:
        """Decode until every row is complete or parked.

        Raises:
            CapacityError: if not even one row fits.
        """
        if not self._active[0].drawn:
            self._draw(1)
        while True:
            if self._active:
                self._make_room()
            if not self._active:
                return
            self._compact()
            self._forward()

    # --- tokens ------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Up to the next full block or the next complete step, whichever comes first."""
        size, tail = self._residency.device.block_tokens, self._machine.tail_tokens
        if self._forwarded % tail == 0 and self._forwarded:
            self._open()
        ahead = size - self._forwarded % size
        left = min(row.tokens for row in self._active) - self._active[0].drawn
        count = min(ahead, left)
        grow = len(self._batch)
        own = grow * (self._forwarded + 1)
        seconds = self._machine.costs.tokens(
            self._num_rows, self._read + own, self._seen + own, grow, count
        )
        self._machine.clock.advance(seconds)
        self._forwarded += count
        self._draw(count)

    def _draw(self, count: int) -> None:
        for row in self._active:
            row.drawn += count
        stopped = [row for row in self._active if row.complete]
        if not stopped:
            return
        self._active = [row for row in self._active if not row.complete]
        self._seal([row.segment for row in stopped if not row.stop.ends_path])
        for row in stopped:
            self._saw(row.tokens)
            if row.stop.ends_path:  # never extended, so nobody will read its KV
                self._residency.clear(row.segment)

    def _compact(self) -> None:
        if worth_compacting(len(self._active), self._num_rows):
            self._batch = list(self._active)
            self._num_rows = padded_rows(len(self._batch))
            self._count_paths()

    def _count_paths(self) -> None:
        """Tokens of the paths of the present batch: read, and seen."""
        nodes = [row.node for row in self._batch]
        self._seen = self._read = sum(node.start for node in nodes)
        if self._machine.costs.layout is Layout.TREE:
            self._read = sum(segment.length for segment in self._path_needs(nodes))

    def _open(self) -> None:
        own = len(self._batch) * self._forwarded
        seconds = self._machine.costs.open_group(self._num_rows, self._read + own)
        self._machine.clock.advance(seconds)

    # --- blocks ------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """At the end of a block: store it, and find one more for every row, or park rows."""
        size = self._residency.device.block_tokens
        if self._forwarded % size:
            return
        segments = [row.segment for row in self._active]
        if self._forwarded > self._stored:
            self._append(segments)
            self._stored = self._forwarded
            if self._write_back:
                self._residency.write_back(segments, sealed=False)
        while not self._reserve():
            self._hold_only_active()
            if self._reserve():
                return
            if len(self._active) == 1 or not self._residency.evicts:
                self._residency.reserve(self._next_block())  # raises, and says what is missing
            self._park()

    def _next_block(self) -> dict[Segment, int]:
        size = self._residency.device.block_tokens
        return {row.segment: row.segment.length + size for row in self._active}

    def _reserve(self) -> bool:
        try:
            self._residency.reserve(self._next_block())
        except CapacityError:
            return False
        return True

    def _append(self, segments: Sequence[Segment]) -> None:
        self._residency.append(segments, [self._forwarded - self._stored] * len(segments))

    def _seal(self, segments: Sequence[Segment]) -> None:
        self._append(segments)
        for segment in segments:
            self._residency.trim(segment)
        if self._write_back:
            self._residency.write_back(segments)

    def _park(self) -> None:
        row = self._active.pop()
        self._residency.trim(row.segment)

    def _hold_only_active(self) -> None:
        mine = dict(self._path_needs([row.node for row in self._active]))
        mine.update({row.segment: 1 for row in self._active})
        self._lease.keep(mine)
