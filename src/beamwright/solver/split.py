"""Which split of KV memory a solver runs, and what is said of it."""

from __future__ import annotations

import torch

from beamwright.config import Settings
from beamwright.engine.moving import MovingSplit
from beamwright.kv.pool import ScratchMeter
from beamwright.models import SharedBytes, TreeModel
from beamwright.models.address_space import address_space_left
from beamwright.plan.costs import ModelCosts
from beamwright.solver.memory import MemoryPlan
from beamwright.solver.solution import MemoryStats
from beamwright.solver.tiers import machine_profile


def shared_bytes(settings: Settings, plan: MemoryPlan) -> SharedBytes | None:
    """The memory of both models where it can move: a pool on a CPU takes pages as it is used.

    Both have address space for all of it, so there must be no limit on that.
    """
    if not isinstance(settings.memory.split, str) or address_space_left() is not None:
        return None
    if torch.device(settings.model.device).type != "cpu":
        return None
    return SharedBytes(plan.kv_bytes, ScratchMeter())


def moving_split(settings: Settings, generator: TreeModel, verifier: TreeModel) -> MovingSplit:
    """What moves memory between two models that share it."""
    step = settings.step
    longest = step.step_tokens or max(step.step_limits or (step.max_step_tokens,))
    return MovingSplit(
        generator.store,
        verifier.store,
        (_costs(generator), _costs(verifier)),
        machine_profile(settings.model.device),
        str(settings.memory.split),
        longest,
        scores_early=settings.schedule.speculation != "off",
    )


def memory_stats(split: str | float, plan: MemoryPlan, moving: MovingSplit | None) -> MemoryStats:
    """What a solution says of the memory of both models."""
    if moving is None:
        return MemoryStats(split, plan.generator_kv_bytes, plan.verifier_kv_bytes, 0, 0)
    counts, parts = moving.counts, (moving.generator_bytes, moving.verifier_bytes)
    return MemoryStats(split, *parts, counts.moves, counts.moved_bytes)


def _costs(model: TreeModel) -> ModelCosts:
    return ModelCosts.of(model.decoder.shape, model.decoder.dtype.itemsize)
