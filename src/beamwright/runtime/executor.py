"""PlainExecutor: one piece of work at a time, scores first.

This is the specification that overlapped executors are compared with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from beamwright.errors import BeamwrightError, DeviceMemoryError, LinkError
from beamwright.models.device_memory import is_out_of_memory
from beamwright.progress import Progress
from beamwright.protocols import Event, Plan, ScheduleView, StepFailed, Verifier
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.scores import scored
from beamwright.runtime.timeline import NullTimeline, Timeline
from beamwright.tree import Node

_LESS = "lower --n, --max-batch or --kv-memory; other programs may hold some of it"


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
    """An `Executor` that runs iterations and scores one after the other on one device."""

    def __init__(
        self,
        writer: StepWriter,
        verifier: Verifier,
        accounting: Accounting,
        stalled_s: Callable[[], float] = lambda: 0.0,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._writer, self._verifier = writer, verifier
        self._accounting, self._stalled_s = accounting, stalled_s
        self._timeline = timeline or NullTimeline()
        self._progress = progress or Progress()
        self._unscored: deque[tuple[Node, ...]] = deque()
        self._groups_before = writer.num_groups - accounting.num_groups

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

    def verify(self, nodes: Sequence[Node]) -> None:
        if nodes:
            self._unscored.append(tuple(nodes))

    def wait(self) -> list[Event]:
        """Scores come first: a round waits for them."""
        if self._unscored:
            return self._score(self._unscored.popleft())
        return self._iterate() if self._writer.busy else []

    def cancel(self, nodes: Sequence[Node]) -> None:
        self._writer.cancel(nodes)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own, and forget what waits for a score."""
        gone = set(nodes)
        self._unscored = deque(each for each in self._unscored if not gone.issuperset(each))
        self._writer.release(nodes)
        self._verifier.release(nodes)

    def _iterate(self) -> list[Event]:
        number = self._writer.num_groups - self._groups_before
        with self._timed("decode", "compute", group=number):
            events = list(self._writer.iterate())
        self._accounting.num_groups = self._writer.num_groups - self._groups_before
        return events

    def _score(self, nodes: tuple[Node, ...]) -> list[Event]:
        self._progress.doing(f"round {nodes[0].round}: scoring {len(nodes)} steps")
        try:
            with self._timed("verify", "verify", steps=len(nodes)):
                scores = self._verifier.score(nodes)
            return [*scored(self._verifier, nodes, scores)]
        except LinkError:
            raise
        except BeamwrightError as error:
            return [StepFailed(nodes[0], error)]

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
