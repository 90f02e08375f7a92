"""VirtualLink: the simulated link between device and host. It moves no bytes.

As in `kv.Link`, each direction has a queue, both directions run concurrently, and bytes are counted
exactly. A transfer has finished once the virtual clock has passed its end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from beamwright.kv.link import Transfer, TransferState, TransferTimeline
from beamwright.kv.streams import Piece
from beamwright.protocols import Direction
from beamwright_lab.simulator.clock import VirtualClock

# Kind of transfers of recurrent states.
STATE = "state"
# Seconds of a transfer, from its bytes, number of pieces and direction.
TransferSeconds = Callable[[int, int, Direction], float]


class VirtualLink:
    """A `Link` whose transfers take virtual time.

    seconds: returns the duration of a transfer.
    state_bytes: the bytes of `bytes_moved` that are recurrent states.
    """

    strided = True

    def __init__(
        self,
        clock: VirtualClock,
        seconds: TransferSeconds,
        *,
        timeline: TransferTimeline | None = None,
    ) -> None:
        self.bytes_moved: Counter[Direction] = Counter()
        self.state_bytes: Counter[Direction] = Counter()
        self.busy_s: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self.timeline = timeline
        self._clock, self._seconds = clock, seconds
        self._queues = {direction: _DirectionQueue(self, direction) for direction in Direction}
        clock.add_listener(self._update)

    def submit(self, direction: Direction, kind: str, pieces: Sequence[Piece]) -> Transfer:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        return self.submit_bytes(direction, kind, num_bytes, len(pieces))

    def submit_bytes(
        self, direction: Direction, kind: str, num_bytes: int, num_pieces: int
    ) -> Transfer:
        """Queue a transfer that is known only by its size."""
        transfer = Transfer(direction, kind, num_bytes)
        took_s = self._seconds(num_bytes, num_pieces, direction)
        self._queues[direction].put(_Queued(transfer, num_pieces, self._clock.now_s, took_s))
        self._update()
        return transfer

    def wait(self, transfers: Iterable[Transfer]) -> float:
        """Advance the clock to the end of these transfers, and return the seconds waited."""
        pending = {id(transfer) for transfer in transfers if not transfer.finished}
        if not pending:
            return 0.0
        ends = [queue.end_of(pending) for queue in self._queues.values()]
        return self._clock.advance_to(max(ends))

    def delay_compute(self, transfers: Iterable[Transfer]) -> float:
        """Wait as `wait` does, because host and device have the same clock."""
        return self.wait(transfers)

    def batch_transfers(self) -> AbstractContextManager[None]:
        """Do nothing: submitting transfers in a batch saves no simulated time."""
        return nullcontext()

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """Cancel unfinished transfers. A piece that is being copied still occupies the link."""
        self._update()
        for transfer in transfers:
            if not transfer.finished:
                self._queues[transfer.direction].cancel(transfer, self._clock.now_s)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def _update(self) -> None:
        for queue in self._queues.values():
            queue.update(self._clock.now_s)


@dataclass(eq=False)
class _Queued:
    transfer: Transfer
    num_pieces: int
    submitted_s: float
    took_s: float


class _DirectionQueue:
    """One direction of the link: its queue, and the time at which the link was last free."""

    def __init__(self, link: VirtualLink, direction: Direction) -> None:
        self._link, self._direction = link, direction
        self._queue: deque[_Queued] = deque()
        self._free_s = 0.0

    def put(self, queued: _Queued) -> None:
        self._queue.append(queued)

    def update(self, now_s: float) -> None:
        """Finish the transfers that have ended by now, and mark the running one."""
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
        """Return the time at which the last of these transfers ends."""
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
