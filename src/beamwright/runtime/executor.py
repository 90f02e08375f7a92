"""TorchExecutor: the plain executor. Work waits in order; `wait` does all of it.

This is the specification that overlapped executors are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from beamwright.errors import DeviceMemoryError
from beamwright.models.device_memory import is_out_of_memory
from beamwright.progress import Progress
from beamwright.protocols import (
    DecodeWork,
    Event,
    ScheduleView,
    StepDecoded,
    StepParked,
    Ticket,
    Verifier,
    VerifyWork,
    Work,
)
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.scores import scored
from beamwright.runtime.timeline import NullTimeline, Timeline
from beamwright.tree import Node

_LESS = "lower --n, --max-batch or --kv-memory; other programs may hold some of it"


class Decoder(Protocol):
    """Writes the next step of a group: with tensors, or in a simulation."""

    def view(self, beams: tuple[Node, ...]) -> ScheduleView: ...

    def decode(self, work: DecodeWork) -> Sequence[StepDecoded | StepParked]: ...

    def release(self, nodes: Sequence[Node]) -> None: ...


class TorchExecutor:
    """Runs decode and verify work one after the other on one device."""

    def __init__(
        self,
        decoder: Decoder,
        verifier: Verifier,
        accounting: Accounting,
        stalled_s: Callable[[], float] = lambda: 0.0,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._decoder, self._verifier = decoder, verifier
        self._accounting, self._stalled_s = accounting, stalled_s
        self._timeline = timeline or NullTimeline()
        self._progress = progress or Progress()
        self._queue: dict[Ticket, Work] = {}
        self._next: Ticket = 0

    def submit(self, work: Work) -> Ticket:
        """Queue a piece of work."""
        ticket = self._next
        self._next += 1
        self._queue[ticket] = work
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Forget work that has not started."""
        self._queue.pop(ticket, None)

    def wait(self) -> list[Event]:
        """Do all queued work, in the order submitted."""
        events: list[Event] = []
        while self._queue:
            ticket = next(iter(self._queue))
            events.extend(self._run(self._queue.pop(ticket)))
        return events

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """See `protocols.Executor`."""
        return self._decoder.view(beams)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own."""
        self._decoder.release(nodes)
        self._verifier.release(nodes)

    def _run(self, work: Work) -> list[Event]:
        if isinstance(work, DecodeWork):
            self._accounting.num_groups += 1
            number = self._accounting.num_groups
            with self._timed("decode", "compute", group=number, beams=len(work.beams)):
                return list(self._decoder.decode(work))
        assert isinstance(work, VerifyWork)
        if work.nodes:
            self._progress.doing(f"round {work.nodes[0].round}: scoring {len(work.nodes)} steps")
        with self._timed("verify", "verify", steps=len(work.nodes)):
            scores = self._verifier.score(work.nodes)
        return [*scored(self._verifier, work.nodes, scores)]

    @contextmanager
    def _timed(self, phase: str, track: str, **args: Any) -> Iterator[None]:
        """A phase; what it waited for the link counts as stall."""
        before = self._stalled_s()
        try:
            with self._accounting.phase(phase), self._timeline.span(phase, track, **args):
                yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(f"a round cannot be finished ({phase})", _LESS) from error
        finally:
            self._accounting.stalled(phase, self._stalled_s() - before)
