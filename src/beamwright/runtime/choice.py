"""Which executor a run has: what the settings name, or what is measured to be faster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from beamwright.config import ScheduleSettings
from beamwright.models import TreeModel
from beamwright.progress import Progress
from beamwright.protocols import Executor, ScoresBeside, Verifier
from beamwright.runtime.accounting import Accounting
from beamwright.runtime.executor import PlainExecutor, StepWriter
from beamwright.runtime.lane_compute import lane_compute
from beamwright.runtime.lanes import OverlappedExecutor
from beamwright.runtime.threads import Threads
from beamwright.runtime.timeline import Timeline
from beamwright.runtime.trial import Trial

STEPS_TOGETHER = {"lockstep": 2**31, "continuous": 1, "decoupled": 64}
"""Steps of several trees that are scored in one turn of a verifier that is a model."""

PATIENCE_S = 1.0
"""Seconds that nobody needs a user's verifier any more before its thread is left to itself."""


@dataclass(frozen=True)
class Run:
    """What the choice depends on: trees in flight (None for as many as there is work for), whether
    results depend on a batch, threads; trial: of earlier problems."""

    in_flight: int | None
    exact: bool
    threads: Threads
    trial: Trial = field(default_factory=Trial)


def make_executor(
    settings: ScheduleSettings,
    run: Run,
    writer: StepWriter,
    verifier: Verifier,
    accounting: Accounting,
    models: Sequence[TreeModel],
    timeline: Timeline,
    progress: Progress,
) -> Executor:
    """The executor for a run. models: the generator first, then the verifier's if it has one."""
    most_steps = STEPS_TOGETHER[settings.explore] if len(models) > 1 else 1
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
        compute=lane_compute(models[-1].decoder.device),
        scoring_stalled_s=partial(_stalled_s, models[1:]),
        patience_s=PATIENCE_S if len(models) == 1 else None,
        most_steps=most_steps,
        trial=run.trial if settings.executor == "auto" else None,
    )


def overlaps(
    settings: ScheduleSettings, run: Run, verifier: Verifier, models: Sequence[TreeModel]
) -> bool:
    """True if the verifier has a lane of its own; never one that does not say that it may.

    "auto": where that may be faster (docs/experiments.md), and changes nothing else: a model on a
    CPU with a core for each of the lane's threads, several trees in flight, no KV that has had to
    leave the device so far, and results that do not depend on a batch. `Trial` measures it then.
    """
    if not (isinstance(verifier, ScoresBeside) and verifier.beside_decoding):
        return False
    if settings.executor != "auto":
        return settings.executor == "overlapped"
    return (
        run.in_flight != 1
        and run.exact
        and len(models) > 1
        and not any(model.store.outgrown for model in models)
        and models[-1].decoder.device.type == "cpu"
        and num_cores() >= 2 * run.threads.count
    )


def _stalled_s(models: Sequence[TreeModel]) -> float:
    return sum(model.store.stall_s for model in models)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
