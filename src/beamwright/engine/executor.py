"""Executors: the step writer and the verifier on one device, in turn or beside each other.

`PlainExecutor` does one piece of work at a time, scores first: it is the specification that
`OverlappedExecutor`, and the simulator's, are compared with. When scores arrive depends on the
clock, what they are does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from beamwright.engine.concurrency import Models, Trial, are_apart
from beamwright.engine.scoring import Scoring, no_more_memory
from beamwright.engine.timeline import Accounting, Timeline
from beamwright.engine.verifier_worker import OnCuda, VerifierWorker, on_host
from beamwright.models.tree_model import TreeModel
from beamwright.progress import Progress
from beamwright.protocols import DecodesAhead, Event, StepDecoded, StepWriter, Verifier
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node

STEPS_TOGETHER = {"lockstep": 2**31, "continuous": 1, "decoupled": 64}
"""Steps of several trees that are scored in one call of a verifier that is a model."""

PATIENCE_S = 1.0
"""Seconds that nobody needs a user's verifier any more before its thread is left to itself."""


class PlainExecutor:
    """Runs iterations of the writer and calls of the verifier one after the other on one device.

    ahead: the writer, where it may decode children that selection has not opened yet.
    stalled_s: seconds that models have waited for the link so far.
    patience_s: seconds that a tree whose deadline has passed still waits for scores, where they
    may never come; None where they surely will.
    """

    patience_s: float | None = None

    def __init__(
        self,
        writer: StepWriter,
        scoring: Scoring,
        stalled_s: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.writer, self._scoring, self._stalled_s = writer, scoring, stalled_s
        self.ahead = writer if isinstance(writer, DecodesAhead) else None
        self._accounting, self._progress = scoring.accounting, progress or Progress()
        self._groups_before = writer.num_groups - self._accounting.counts.groups

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        """Score these finished steps of one tree; those of a larger priority first."""
        if nodes:
            self._scoring.queue.put(tuple(nodes), priority)

    def wait(self) -> list[Event]:
        """Do one bounded piece of work: a batch of scores, or an iteration of the running batch.

        Scores come first: a round waits for them. Returns no event where no step has ended, where
        there was nothing to do, and where scores have not come for `patience_s`.
        """
        if self._scoring.queue:
            nodes = self._scoring.queue.take()
            self._progress.doing(f"round {nodes[0].round}: scoring {len(nodes)} steps")
            return self._scoring.score(nodes)
        return self._iterate() if self.writer.busy else []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free every KV segment that these nodes own, as soon as nobody reads it.

        What waits for a score is forgotten.
        """
        self._scoring.queue.release(nodes)
        self.writer.release(nodes)
        self._scoring.release(nodes)

    def close(self) -> None:
        """Stop what runs beside the caller; returns when all that was released is free.

        What waits for a score is forgotten. It can be used again.
        """

    def _iterate(self) -> list[Event]:
        number = self.writer.num_groups - self._groups_before
        with (
            no_more_memory("decode"),
            self._accounting.phase("decode", self._stalled_s),
            self._scoring.timeline.span("decode", "compute", group=number) as facts,
        ):
            events = list(self.writer.iterate())
            if self.ahead is not None:
                facts["open_rows"], facts["rows_ahead"] = self.ahead.last_rows
        self._accounting.counts.groups = self.writer.num_groups - self._groups_before
        return events


class OverlappedExecutor(PlainExecutor):
    """Decodes while a thread of its own scores; waits only where there is nothing to decode.

    stalled_s: of the generator alone. trial: says when it takes turns after all; None: never.
    """

    def __init__(
        self,
        writer: StepWriter,
        worker: VerifierWorker,
        stalled_s: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
        trial: Trial | None = None,
    ) -> None:
        super().__init__(writer, worker.scoring, stalled_s, progress)
        self._worker, self.patience_s, self._trial = worker, worker.patience_s, trial
        if trial is not None:
            trial.begin()

    def verify(self, nodes: Sequence[Node], priority: int = 0) -> None:
        if nodes:
            self._worker.put(nodes, priority)

    def wait(self) -> list[Event]:
        events = self._worker.take()
        if events is None:
            events = self._decode_or_wait()
        if self._trial is not None:
            steps = [event.token_ids for event in events if isinstance(event, StepDecoded)]
            self._trial.note(sum(map(len, steps)), awaited=self._worker.busy)
        return events

    def _decode_or_wait(self) -> list[Event]:
        scoring, ahead = self._worker.busy, self.ahead is not None and self.ahead.speculating
        waits = scoring and self._trial is not None and self._trial.drains
        if not waits and (self.writer.busy or (scoring and ahead)):
            return self._iterate()
        if scoring:
            self._progress.doing("scoring steps")
        return self._worker.take(wait=True) or []

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the generator's KV of these nodes at once, the verifier's before it scores anything
        more."""
        self.writer.release(nodes)
        self._worker.release(nodes)

    def close(self) -> None:
        self._worker.close()


def make_executor(
    settings: ScheduleSettings,
    writer: StepWriter,
    verifier: Verifier,
    accounting: Accounting,
    models: Models,
    timeline: Timeline,
    progress: Progress,
    trial: Trial,
    *,
    beside: bool,
) -> PlainExecutor:
    """The executor for a run. trial: of earlier problems. beside: see `overlaps`."""
    generator, scorer = models
    most_steps = 1 if scorer is None else STEPS_TOGETHER[settings.explore]
    stalled_s = partial(_stalled_s, models[1:] if beside else models)
    scoring = Scoring(verifier, accounting, stalled_s, timeline, most_steps)
    if not beside:
        return PlainExecutor(writer, scoring, stalled_s, progress)
    device = None if (model := scorer or generator) is None else model.decoder.device
    context = OnCuda(device) if device is not None and device.type == "cuda" else on_host
    worker = VerifierWorker(scoring, context, PATIENCE_S if scorer is None else None)
    # Whether the worker is faster is to be measured where both share a device.
    tries = settings.executor == "auto" and generator is not None and not are_apart(models)
    stalled_s = partial(_stalled_s, models[:1])
    return OverlappedExecutor(writer, worker, stalled_s, progress, trial if tries else None)


def _stalled_s(models: Sequence[TreeModel | None]) -> float:
    return sum(model.store.stall_s for model in models if model is not None)
