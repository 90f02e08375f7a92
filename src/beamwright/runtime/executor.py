"""TorchExecutor: the plain executor. Work waits in order; `wait` does all of it.

This is the specification that overlapped executors are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.protocols import (
    DecodeWork,
    Event,
    StepScored,
    Ticket,
    Verifier,
    VerifyWork,
    Work,
)
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.decode import StepDecoder
from beamwright.tree import Node


class TorchExecutor:
    """Runs decode and verify work one after the other on one device."""

    def __init__(self, decoder: StepDecoder, verifier: Verifier, accounting: Accounting) -> None:
        self._decoder, self._verifier = decoder, verifier
        self._accounting = accounting
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

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own."""
        self._decoder.release(nodes)
        self._verifier.release(nodes)

    def _run(self, work: Work) -> list[Event]:
        if isinstance(work, DecodeWork):
            self._accounting.num_groups += 1
            with self._accounting.phase("decode"):
                return list(self._decoder.decode(work.beams))
        assert isinstance(work, VerifyWork)
        with self._accounting.phase("verify"):
            scores = self._verifier.score(work.nodes)
        return [StepScored(node, score) for node, score in zip(work.nodes, scores, strict=True)]
