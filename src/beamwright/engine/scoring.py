"""Scoring: a batch of steps through the verifier, and what comes of it as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from beamwright.engine.accounting import Accounting
from beamwright.engine.scores import scored
from beamwright.engine.timeline import NullTimeline, Timeline
from beamwright.errors import BeamwrightError, CapacityError, DeviceMemoryError, LinkError
from beamwright.models.device_memory import is_out_of_memory
from beamwright.protocols import Event, ScoresBeside, StepFailed, Verifier
from beamwright.tree import Node, by_root

_LESS = "lower --n, --max-batch or --kv-memory; other programs may hold some of it"


class Scoring:
    """A verifier with its clocks. One thread at a time may call it.

    stalled_s: seconds that the verifier has waited for the link so far.
    """

    def __init__(
        self,
        verifier: Verifier,
        accounting: Accounting,
        stalled_s: Callable[[], float] = lambda: 0.0,
        timeline: Timeline | None = None,
    ) -> None:
        self._verifier, self._accounting, self._stalled_s = verifier, accounting, stalled_s
        self._timeline = timeline or NullTimeline()
        self._failed: set[Node] = set()
        self._without_room: set[Node] = set()

    def score(self, nodes: Sequence[Node]) -> list[Event]:
        """An event per step, or the failure of its tree; where room is missing, of every step.

        What there was no room for is released, and may be asked about again.

        Speculative children, where a verifier says that it may be asked about them, come behind
        their parents, level by level in the same turn: FlashTTS (section 4.1.3) sends both steps as
        one request, which reads as little KV and would change a score's last bits. What cannot be
        scored of them gets no event.

        Raises:
            LinkError: if the link has failed.
        """
        # A tree that has failed may have had other steps on their way already.
        nodes = [node for node in nodes if node.root not in self._failed]
        steps = [node for node in nodes if not node.speculative]
        try:
            events = self._level(steps)
        except LinkError:
            raise
        except BeamwrightError as error:
            return self._without(steps, error)
        beside = isinstance(self._verifier, ScoresBeside) and self._verifier.beside_decoding
        ahead = [node for node in nodes if node.speculative and beside]
        ahead.sort(key=lambda node: node.depth)
        for _, level in groupby(ahead, key=lambda node: node.depth):
            children = list(level)
            ready = [child for child in children if child.parent not in self._without_room]
            try:
                events += self._level(ready)
            except LinkError:
                raise
            except BeamwrightError:
                ready = []
            self._give_up([child for child in children if child not in ready])
        return events

    def _without(self, steps: Sequence[Node], error: BeamwrightError) -> list[Event]:
        """These could not be scored together: each tree on its own, or what went wrong."""
        trees = by_root(steps)
        if len(trees) == 1 and not isinstance(error, CapacityError):
            self._failed.update(trees)
            return [StepFailed(steps[0], error)]
        self._give_up(steps)
        if len(trees) > 1:
            return [event for mine in trees.values() for event in self.score(mine)]
        return [StepFailed(node, error) for node in steps]

    def _give_up(self, nodes: Sequence[Node]) -> None:
        """These could not be scored, and so nothing that reads them."""
        self._without_room.update(nodes)
        self._verifier.release(nodes)

    def _level(self, nodes: Sequence[Node]) -> list[Event]:
        if not nodes:
            return []
        with (
            no_more_memory("verify"),
            self._accounting.phase("verify", self._stalled_s),
            self._timeline.span("verify", "verify", steps=len(nodes)),
        ):
            scores = self._verifier.score(nodes)
        self._without_room.difference_update(nodes)
        counts = self._accounting.counts
        counts.verifier_calls += 1
        counts.scored_steps += len(nodes)
        counts.scored_tokens += sum(len(node.token_ids) for node in nodes)
        return [*scored(self._verifier, nodes, scores)]

    def leave(self, thread: int | None) -> None:
        """Stop the clocks of a thread that may never come back from `score`."""
        self._accounting.leave(thread)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free what the verifier keeps on these nodes."""
        self._failed.difference_update(nodes)
        self._without_room.difference_update(nodes)
        self._verifier.release(nodes)


@contextmanager
def no_more_memory(phase: str) -> Iterator[None]:
    """Memory that is refused is an error with a line of advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(f"a round cannot be finished ({phase})", _LESS) from error
