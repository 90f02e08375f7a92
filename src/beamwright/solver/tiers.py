"""What `auto` stands for: the faster schedule, for the models and the machine at hand.

Knows settings, sizes and this machine; loads no models (LBS, section 4).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.plan.compare import choose_schedule
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import (
    DEFAULT_PROFILE,
    HardwareProfile,
    card_of_device,
    card_profile,
    find_profile,
)
from beamwright.plan.workload import Workload
from beamwright.sections import ScheduleSettings
from beamwright.solver.memory import ModelBytes
from beamwright.solver.request import IGNORED, IN_ROUNDS

_STREAMED_ATTENTION = ("auto", "tree", "dense")  # what layer-wise offloading can wrap
TYPICAL_PROMPT_TOKENS = 128
_TYPICAL_STEP_TOKENS = 32


def chosen_schedule(
    settings: Settings, generator: ModelBytes, kv_bytes: int, *, needs_turns: bool = False
) -> str:
    """What `--schedule` stands for: `auto` asks the cost model for the faster of two.

    Where everything fits, locality is one group and never touches the link, so it stands for
    `in-gpu` too, and needs no promise about how long the paths will be.
    needs_turns: memory has to move between generator and verifier, as it does beside groups alone.
    """
    schedule = settings.schedule.schedule
    if schedule == "auto" and settings.sparse.sparse_home == "host":
        return "in-gpu"  # nothing has to leave what is at home
    if schedule != "auto":
        return schedule
    on_gpu = torch.device(settings.model.device).type == "cuda"
    if settings.model.attention not in _STREAMED_ATTENTION or (
        settings.model.deterministic and on_gpu
    ):
        return "locality"
    if needs_turns or _asks_for_groups(settings):
        return "locality"
    workload = expected_workload(settings, generator.shape.context)
    costs = ModelCosts.of(generator.shape, generator.element_bytes, generator.storage)
    layout = Layout.DENSE if settings.model.attention.endswith("dense") else Layout.TREE
    fastest = choose_schedule(
        workload, costs, machine_profile(settings.model.device), kv_bytes, layout
    )
    return "layerwise" if fastest == "layerwise" else "locality"


def _asks_for_groups(settings: Settings) -> bool:
    """True if something was asked for that does nothing where layers are streamed."""
    schedule, usual = settings.schedule, ScheduleSettings()
    return (
        settings.memory.split in IN_ROUNDS
        or schedule.batching == "continuous"
        or schedule.speculation in ("exact", "truncate")
        or any(getattr(schedule, n) != getattr(usual, n) for n in IGNORED["layerwise"])
    )


def expected_workload(settings: Settings, context: int) -> Workload:
    """The longest search that the settings allow, behind a prompt of usual length."""
    search = settings.search
    step_tokens = settings.step.step_tokens or _TYPICAL_STEP_TOKENS
    longest = context - TYPICAL_PROMPT_TOKENS
    limits = [longest, search.max_rounds * step_tokens, settings.step.max_tokens or longest]
    return Workload(
        num_beams=search.n,
        width=search.width if search.n % search.width == 0 else 1,
        prompt_tokens=TYPICAL_PROMPT_TOKENS,
        generate_tokens=max(1, min(limits)),
        step_tokens=step_tokens,
    )


def machine_profile(device: str) -> HardwareProfile:
    """The card by its data sheet; the CPU as `doctor --probe` found it, else a named one.

    A card that nobody has listed is taken for the default one, with its own memory.
    """
    if torch.device(device).type == "cuda":
        found = torch.cuda.get_device_properties(device)
        card = card_of_device(found.name, found.total_memory)
        profile = find_profile(DEFAULT_PROFILE) if card is None else card_profile(card)
        return replace(profile, device_memory_bytes=found.total_memory)
    try:
        return find_profile("measured")
    except InputError:
        return find_profile("epyc-2core")
