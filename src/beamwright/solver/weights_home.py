"""Prepares the homes of layers that `--memory` cannot hold, before models are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.kv.link import StreamLink, Wire
from beamwright.kv.streams import CudaStreams, HostStreams
from beamwright.models.expert_offload import ExpertOffload
from beamwright.models.hf_config import find_shape
from beamwright.models.load import resolve_precision
from beamwright.models.offload import LayerOffload, WeightOffload
from beamwright.models.weight_homes import FileHome, HostHome, WeightHome
from beamwright.plan.machines import with_link_bandwidth
from beamwright.solver.auto_settings import expected_workload, machine_profile
from beamwright.solver.memory import FREE_SHARE, host_memory_bytes
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.offload import choose_offload
from beamwright.sparse.rule import METHODS
from beamwright.verify.find import find_verifier_shape

_DISK_BANDWIDTH = 2_000_000_000  # bytes per second of an NVMe drive, assumed


def make_offloads(
    settings: Settings, wire: Wire, free_bytes: int | None, *, has_own: bool
) -> Mapping[str, WeightOffload]:
    """Return, by role, what takes the weights of layers that do not fit; empty if all fit.

    wire: the link to the host, which KV shares; bytes of weights are counted apart.
    free_bytes: free memory of the GPU; None on a CPU.
    has_own: True if the user's own verifier scores.

    Raises:
        InputError: if weights do not fit the host, or for an option that offloading excludes.
    """
    memory, device = settings.memory, torch.device(settings.model.device)
    if memory.weights_home == "disk" and device.type != "cpu":
        raise InputError("--weights-home disk: a GPU gets weights from the host; use host")
    if memory.memory is None and free_bytes is not None:
        limit = int(FREE_SHARE * free_bytes)
        memory = memory.model_copy(update={"memory": limit})
    if memory.memory is None or memory.weights_home == "device":
        return {}
    models = _sizes(settings, has_own=has_own)
    rules = {
        "in_place": device.type == "cuda",
        "free_bytes": free_bytes,
        "step_tokens": settings.step.longest if device.type == "cpu" else None,
    }
    bandwidth = settings.schedule.link_bandwidth
    if _is_on_disk(settings):
        bandwidth = min(_DISK_BANDWIDTH, bandwidth or _DISK_BANDWIDTH)
    profile = with_link_bandwidth(machine_profile(str(device), graphs=False), bandwidth)
    workload = expected_workload(settings, models[0].shape.context)
    chosen = choose_offload(memory, models, workload, profile, rules)
    roles = zip(("generator", "verifier"), chosen, strict=False)
    moved = {role: model for role, model in roles if model.offloaded is not None}
    if moved:
        _check(settings, models, moved.values())
    return {role: _make(settings, model, wire, device) for role, model in moved.items()}


def _check(
    settings: Settings,
    models: Sequence[ModelBytes],
    moved: Iterable[ModelBytes],
) -> None:
    """Check that options and host memory allow these models to be offloaded.

    Raises:
        InputError: if not.
    """
    method = METHODS.get(settings.sparse.sparse)
    if method is not None and method.query == "ahead":
        needed = format_bytes(sum(model.all_weights for model in models))
        raise InputError(
            f"--sparse {settings.sparse.sparse} reads the next layer's weights early, so all "
            f"weights must fit. They take {needed}: raise --memory."
        )
    if _is_on_disk(settings):
        return
    at_home = sum(each.offloaded.home_bytes for each in moved if each.offloaded is not None)
    if at_home > (most := host_memory_bytes()):
        raise InputError(
            f"--weights-home host: {format_bytes(at_home)} of weights do not fit in the "
            f"{format_bytes(most)} of host memory. Use smaller weights (--weights int4)."
        )


def _make(settings: Settings, model: ModelBytes, wire: Wire, device: torch.device) -> WeightOffload:
    assert model.offloaded is not None
    numbers, depth = model.offloaded.numbers, model.shape.layers
    on_disk = _is_on_disk(settings)
    home: WeightHome = FileHome() if on_disk else HostHome(device)
    own = Wire(wire.emulated_bandwidth) if on_disk else wire.with_own_counter()
    link = StreamLink(CudaStreams(device) if device.type == "cuda" else HostStreams(), wire=own)
    if model.shape.built is not None and model.shape.built.experts:
        return ExpertOffload(1 - len(numbers) / depth, home, link, str(device))
    return LayerOffload(numbers, home, link, str(device))


def _is_on_disk(settings: Settings) -> bool:
    named = settings.memory.weights_home
    return named == "disk" or (named == "auto" and settings.model.device == "cpu")


def _sizes(settings: Settings, *, has_own: bool) -> list[ModelBytes]:
    """Return the sizes of generator and verifier, as far as they are known before loading."""
    named = {"generator": find_shape(settings.model)}
    if not has_own and (shape := find_verifier_shape(settings.model)) is not None:
        named["verifier"] = shape
    sizes = []
    for role, shape in named.items():
        dtype, storage = resolve_precision(settings.model, shape, role)
        scores = role == "verifier" and settings.model.device != "cpu"
        parts = settings.schedule.verifiers if role == "verifier" else 1
        kept = shape, dtype.itemsize, storage, settings.model.kv_dtype
        sizes.append(ModelBytes(*kept, scores, parts))
    return sizes
