"""PlainExecutor: one piece of work at a time, scores first.

This is the specification that the overlapped executor (`lanes`) is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from beamwright.engine.accounting import Accounting
from beamwright.engine.scoring import Scoring, no_more_memory
from beamwright.engine.scoring_queue import ScoringQueue
from beamwright.engine.timeline import NullTimeline, Timeline
from beamwright.progress import Progress
from beamwright.protocols import DecodesAhead, Event, Plan, ScheduleView, Verifier
from beamwright.tree import Node


class StepWriter(Protocol):
    """Writes the steps of open nodes: `decode.RunningBatch`, or a simulation of another way."""

    @property
    def running_nodes(self) -> Collection[Node]: ...
    @property
    def busy(self) -> bool: ...
    @property
    def num_groups(self) -> int: ...
    def view(self, beams: tuple[Node, ...]) -> ScheduleView: ...
    def submit(self, plan: Plan) -> None: ...
    def iterate(self) -> Sequence[Event]: ...
    def cancel(self, nodes: Sequence[Node]) -> None: ...
    def release(self, nodes: Sequence[Node]) -> None: ...


class PlainExecutor:
    """An `Executor` that runs iterations and scores one after the other on one device.

    stalled_s: seconds that models have waited for the link so far. most_steps: see `ScoringQueue`.
    """

    patience_s: float | None = None

    def __init__(
        self,
        writer: StepWriter,
        verifier: Verifier,
        accounting: Accounting,
        stalled_s: Callable[[], float] = lambda: 0.0,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
        *,
        most_steps: int = 1,
    ) -> None:
        self._writer, self._accounting, self._stalled_s = writer, accounting, stalled_s
        self._ahead = writer if isinstance(writer, DecodesAhead) else None
        self._timeline = timeline or NullTimeline()
        self._progress = progress or Progress()
        self._scoring = Scoring(verifier, accounting, stalled_s, self._timeline)
        self._unscored = ScoringQueue(most_steps)
        self._groups_before = writer.num_groups - accounting.counts.groups

    @property
    def running(self) -> Collection[Node]:
        return self._writer.running_nodes

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        return self._writer.view(beams)

    def submit(self, plan: Plan) -> None:
        self._writer.submit(plan)

    @property
    def speculation(self) -> str:
        return "off" if self._ahead is None else self._ahead.speculation

    @property
    def last_rows(self) -> tuple[int, int]:
        return (0, 0) if self._ahead is None else self._ahead.last_rows

    @property
    def speculating(self) -> bool:
        return self._ahead is not None and self._ahead.speculating

    def speculate(self, nodes: Sequence[Node]) -> None:
        if self._ahead is not None:
            self._ahead.speculate(nodes)

    def begin_like(self, node: Node, begun: Node, share: float) -> None:
        if self._ahead is not None:
            self._ahead.begin_like(node, begun, share)

    def cancel(self, nodes: Sequence[Node]) -> None:
        self._writer.cancel(nodes)

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        self._unscored.put(nodes, priority)

    def wait(self) -> list[Event]:
        """Scores come first: a round waits for them."""
        if self._unscored:
            nodes = self._unscored.take()
            self._progress.doing(f"round {nodes[0].round}: scoring {len(nodes)} steps")
            return self._scoring.score(nodes)
        return self._iterate() if self._writer.busy else []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own, and forget what waits for a score."""
        self._unscored.release(nodes)
        self._writer.release(nodes)
        self._scoring.release(nodes)

    def close(self) -> None:
        """Nothing runs beside the loop."""

    def _iterate(self) -> list[Event]:
        number = self._writer.num_groups - self._groups_before
        with (
            no_more_memory("decode"),
            self._accounting.phase("decode", self._stalled_s),
            self._timeline.span("decode", "compute", group=number) as facts,
        ):
            events = list(self._writer.iterate())
            if self._ahead is not None:
                facts["open_rows"], facts["rows_ahead"] = self._ahead.last_rows
        self._accounting.counts.groups = self._writer.num_groups - self._groups_before
        return events
