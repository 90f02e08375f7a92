"""VirtualLink: the link of a simulated run. It moves no bytes, only the time that they would take.

Keeps `kv.Link`'s promises: one queue per direction, both at once, exact bytes. A transfer has
finished once the virtual clock has reached the moment of its end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from beamwright.kv.link import KVLog, Transfer, TransferState
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from beamwright_lab.simulator.clock import VirtualClock

# The kind of a transfer of a recurrent layer's state.
STATE = "state"
# Seconds of a transfer of so many bytes in so many pieces.
TransferSeconds = Callable[[int, int, Direction], float]


class VirtualLink:
    """A `Link` whose transfers take virtual time.

    seconds: what a transfer takes. state_bytes: of `bytes_moved`, those of states.
    """

    strided = True

    def __init__(
        self,
        clock: VirtualClock,
        seconds: TransferSeconds,
        *,
        timeline: KVLog | None = None,
    ) -> None:
        self.bytes_moved: Counter[Direction] = Counter()
        self.state_bytes: Counter[Direction] = Counter()
        self.busy_s: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.timeline = timeline
        self._clock, self._seconds = clock, seconds
        self._lanes = {direction: _Lane(self, direction) for direction in Direction}
        clock.watch(self._settle)

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        return self.submit_bytes(direction, kind, num_bytes, len(pieces))

    def submit_bytes(
        self, direction: Direction, kind: str, num_bytes: int, num_pieces: int
    ) -> Transfer:
        """The same for a transfer whose pieces nobody needs to see."""
        transfer = Transfer(direction, kind, num_bytes)
        took_s = self._seconds(num_bytes, num_pieces, direction)
        self._lanes[direction].put(_Queued(transfer, num_pieces, self._clock.now_s, took_s))
        self._settle()
        return transfer

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """The waiting is the clock's."""
        pending = {id(transfer) for transfer in transfers if not transfer.finished}
        if not pending:
            return 0.0
        ends = [lane.end_of(pending) for lane in self._lanes.values()]
        return self._clock.reach(max(ends))

    def order(self, transfers: Iterable[Transfer]) -> float:
        """The clock is the host's and the device's."""
        return self.wait(transfers)

    def together(self) -> AbstractContextManager[None]:
        """What a batch would save is within the cost of a piece."""
        return nullcontext()

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """The piece on its way still occupies the link, but nobody waits for it."""
        self._settle()
        for transfer in transfers:
            if not transfer.finished:
                self._lanes[transfer.direction].cancel(transfer, self._clock.now_s)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.clear()

    def _settle(self) -> None:
        for lane in self._lanes.values():
            lane.settle(self._clock.now_s)


@dataclass(eq=False)
class _Queued:
    transfer: Transfer
    num_pieces: int
    submitted_s: float
    took_s: float


class _Lane:
    """One direction: what waits, and since when the wire is free."""

    def __init__(self, link: VirtualLink, direction: Direction) -> None:
        self._link, self._direction = link, direction
        self._queue: deque[_Queued] = deque()
        self._free_s = 0.0

    def put(self, queued: _Queued) -> None:
        self._queue.append(queued)

    def settle(self, now_s: float) -> None:
        """Finish what has ended by now, and mark what is on its way."""
        while self._queue:
            first = self._queue[0]
            start_s = max(self._free_s, first.submitted_s)
            if start_s + first.took_s > now_s:
                if start_s <= now_s:
                    first.transfer.state = TransferState.RUNNING
                return
            self._queue.popleft()
            self._end(first, start_s, first.took_s, first.transfer.num_bytes)
            first.transfer.state = TransferState.DONE

    def end_of(self, wanted: set[int]) -> float:
        """When the last of these transfers will have ended."""
        end_s = last_s = self._free_s
        for queued in self._queue:
            end_s = max(end_s, queued.submitted_s) + queued.took_s
            if id(queued.transfer) in wanted:
                last_s = end_s
        return last_s

    def cancel(self, transfer: Transfer, now_s: float) -> None:
        queued = next(each for each in self._queue if each.transfer is transfer)
        self._queue.remove(queued)
        if transfer.state is TransferState.RUNNING:
            start_s = max(self._free_s, queued.submitted_s)
            done = (now_s - start_s) / queued.took_s if queued.took_s else 1.0
            pieces = max(1, queued.num_pieces)
            share = min(1.0, math.ceil(done * pieces) / pieces)
            self._end(queued, start_s, share * queued.took_s, round(share * transfer.num_bytes))
        transfer.state = TransferState.CANCELLED

    def clear(self) -> None:
        for queued in self._queue:
            queued.transfer.state = TransferState.CANCELLED
        self._queue.clear()

    def _end(self, queued: _Queued, start_s: float, took_s: float, num_bytes: int) -> None:
        self._free_s = start_s + took_s
        self._link.bytes_moved[self._direction] += num_bytes
        if queued.transfer.kind == STATE:
            self._link.state_bytes[self._direction] += num_bytes
        self._link.busy_s[self._direction] += took_s
        if self._link.timeline is not None and num_bytes:
            kind, track = queued.transfer.kind, str(self._direction)
            end_s = self._free_s
            self._link.timeline.add(kind, track, start_s, end_s, bytes=num_bytes, kind=kind)
