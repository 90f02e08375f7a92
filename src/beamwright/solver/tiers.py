"""The tiers of KV: the host's size, the link there, memory that two models share, `auto`'s choice.

Knows settings, sizes and this machine; loads no models (LBS, section 4; FlashTTS, section 4.3).
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from beamwright.config import Settings
from beamwright.engine.moving import MovingSplit
from beamwright.engine.timeline import Timeline
from beamwright.errors import InputError
from beamwright.kv.link import Link, StreamLink, Wire
from beamwright.kv.pool import ByteBudget
from beamwright.kv.streams import CudaStreams, HostStreams
from beamwright.models.tree_model import HostOptions, TreeModel
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
from beamwright.solver.memory import MemoryPlan, ModelBytes, address_space_left
from beamwright.solver.request import IGNORED, IN_ROUNDS

_FALLBACK_HOST_BYTES = 8 * 1024**3
_MOST_PINNED_BYTES = 16 * 1024**3
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_kv_bytes(settings: Settings) -> int:
    """`--host-memory`, or half of the memory of the machine, or of its container; a quarter of
    what this process may still map, if that is less.

    Pages are committed as they are touched, and pinned for a GPU as they come into use. What is
    pinned is kept from everybody else, so the default is at most 16 GiB there.
    """
    if settings.memory.host_memory is not None:
        return settings.memory.host_memory
    try:
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        half = _FALLBACK_HOST_BYTES
    with suppress(OSError, ValueError):  # the file may be missing, or say "max"
        half = min(half, int(_CONTAINER_LIMIT.read_text(encoding="ascii")) // 2)
    left = address_space_left()
    if left is not None:
        half = min(half, max(1, left // 4))
    pinned = torch.device(settings.model.device).type != "cpu"
    return min(half, _MOST_PINNED_BYTES) if pinned else half


@dataclass(frozen=True)
class HostShares:
    """The host tier of generator and verifier: a link for each, over one wire, and its share.

    Counters of either link are of both.
    """

    generator: HostOptions
    verifier: HostOptions

    @classmethod
    def of(cls, settings: Settings, plan: MemoryPlan, timeline: Timeline) -> HostShares:
        """The tier that the settings ask for, shared so that both models hold equally much."""
        schedule, model = settings.schedule, settings.model
        total, wire = host_kv_bytes(settings), Wire(schedule.link_bandwidth)
        generator = HostOptions(
            int(total * plan.tokens_part),
            _link(model.device, timeline, wire),
            recompute=schedule.evict == "recompute",
            share_loads=schedule.inter_beam,
            victims=schedule.victims,
        )
        link = _link(model.verifier_device or model.device, timeline, wire)
        rest = total - generator.budget_bytes
        return cls(generator, replace(generator, budget_bytes=rest, link=link))

    def close(self) -> None:
        """Stop copier threads; they start again with use."""
        self.generator.link.close()
        self.verifier.link.close()


def _link(name: str, timeline: Timeline, wire: Wire) -> Link:
    device = torch.device(name)
    streams = CudaStreams(device) if device.type == "cuda" else HostStreams()
    return StreamLink(streams, timeline=timeline, wire=wire)


def shared_bytes(settings: Settings, plan: MemoryPlan) -> ByteBudget | None:
    """The memory of both models where it can move: a pool on a CPU takes pages as it is used.

    Both have address space for all of it, so there must be no limit on that.
    """
    if not isinstance(settings.memory.split, str) or address_space_left() is not None:
        return None
    if torch.device(settings.model.device).type != "cpu":
        return None
    return ByteBudget(plan.kv_bytes)


def moving_split(settings: Settings, generator: TreeModel, verifier: TreeModel) -> MovingSplit:
    """What moves memory between two models that share it."""

    def costs_of(model: TreeModel) -> ModelCosts:
        return ModelCosts.of(model.decoder.shape, model.decoder.dtype.itemsize)

    step = settings.step
    longest = step.step_tokens or max(step.step_limits or (step.max_step_tokens,))
    return MovingSplit(
        generator.store,
        verifier.store,
        (costs_of(generator), costs_of(verifier)),
        machine_profile(settings.model.device),
        str(settings.memory.split),
        longest,
        scores_early=settings.schedule.speculation != "off",
    )


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
