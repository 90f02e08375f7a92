"""Which executor a run has: what the settings name, or what is measured to be faster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from beamwright.engine.accounting import Accounting
from beamwright.engine.executor import PlainExecutor, StepWriter
from beamwright.engine.lane_compute import lane_compute
from beamwright.engine.lanes import LaneCompute, OverlappedExecutor
from beamwright.engine.threads import Threads
from beamwright.engine.timeline import Timeline
from beamwright.engine.trial import Trial
from beamwright.models import TreeModel
from beamwright.progress import Progress
from beamwright.protocols import Executor, ScoresBeside, Verifier
from beamwright.sections import ScheduleSettings

STEPS_TOGETHER = {"lockstep": 2**31, "continuous": 1, "decoupled": 64}
"""Steps of several trees that are scored in one turn of a verifier that is a model."""

PATIENCE_S = 1.0
"""Seconds that nobody needs a user's verifier any more before its thread is left to itself."""


@dataclass(frozen=True)
class RunConditions:
    """What the choice depends on: trees in flight (None for as many as there is work for), whether
    results depend on a batch, threads; trial: of earlier problems."""

    in_flight: int | None
    exact: bool
    threads: Threads
    trial: Trial = field(default_factory=Trial)


def make_executor(
    settings: ScheduleSettings,
    run: RunConditions,
    writer: StepWriter,
    verifier: Verifier,
    accounting: Accounting,
    models: tuple[TreeModel | None, TreeModel | None],
    timeline: Timeline,
    progress: Progress,
) -> Executor:
    """The executor for a run.

    models: the generator, None where it runs elsewhere, and the verifier's, None if it has none.
    """
    generator, scorer = models
    most_steps = 1 if scorer is None else STEPS_TOGETHER[settings.explore]
    if not overlaps(settings, run, verifier, models):
        stalled = partial(_stalled_s, models)
        return PlainExecutor(
            writer, verifier, accounting, stalled, timeline, progress, most_steps=most_steps
        )
    return OverlappedExecutor(
        writer,
        verifier,
        accounting,
        partial(_stalled_s, models[:1]),
        timeline,
        progress,
        compute=_lane_compute(scorer or generator),
        scoring_stalled_s=partial(_stalled_s, models[1:]),
        patience_s=PATIENCE_S if scorer is None else None,
        most_steps=most_steps,
        trial=run.trial if _tries(settings, models) else None,
    )


def _tries(settings: ScheduleSettings, models: tuple[TreeModel | None, TreeModel | None]) -> bool:
    """True if it is to be measured whether two lanes are faster than one: they share a device."""
    return settings.executor == "auto" and models[0] is not None and not are_apart(models)


def overlaps(
    settings: ScheduleSettings,
    run: RunConditions,
    verifier: Verifier,
    models: tuple[TreeModel | None, TreeModel | None],
) -> bool:
    """True if the verifier has a lane of its own; never one that does not say that it may.

    "auto": where that may be faster (docs/experiments.md), and changes nothing else: a model on a
    CPU with a core for each of the lane's threads, several trees in flight, no KV that has had to
    leave the device so far, and results that do not depend on a batch. `Trial` measures it then.
    """
    if not (isinstance(verifier, ScoresBeside) and verifier.beside_decoding):
        return False
    if are_apart(models):
        return True  # nobody waits, and each thread has a current device of its own
    if settings.executor != "auto":
        return settings.executor == "overlapped"
    generator, scorer = models
    if generator is None or scorer is None:
        return run.in_flight != 1 and scorer is not None
    return (
        run.in_flight != 1
        and run.exact
        and not (generator.store.outgrown or scorer.store.outgrown)
        and scorer.decoder.device.type == "cpu"
        and num_cores() >= 2 * run.threads.count
    )


def are_apart(models: tuple[TreeModel | None, TreeModel | None]) -> bool:
    """Both are here, on different devices."""
    generator, scorer = models
    if generator is None or scorer is None:
        return False
    return generator.decoder.device != scorer.decoder.device


def _lane_compute(model: TreeModel | None) -> LaneCompute:
    return nullcontext if model is None else lane_compute(model.decoder.device)


def _stalled_s(models: Sequence[TreeModel | None]) -> float:
    return sum(model.store.stall_s for model in models if model is not None)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
