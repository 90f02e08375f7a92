"""Prepares the homes of layers that `--memory` cannot hold, before models are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.kv.link import StreamLink, Wire
from beamwright.kv.streams import CudaStreams, HostStreams
from beamwright.models.hf_config import find_shape
from beamwright.models.load import resolve_precision
from beamwright.models.offload import FileHome, HostHome, LayerOffload, WeightHome
from beamwright.plan.machines import with_link_bandwidth
from beamwright.solver.auto_settings import expected_workload, machine_profile
from beamwright.solver.memory import host_memory_bytes
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.offload import choose_offload
from beamwright.verify.find import find_verifier_shape

_FREE_SHARE = 0.9  # share of a GPU's free memory that is used without `--memory`


def make_offloads(
    settings: Settings, wire: Wire, free_bytes: int | None, *, has_own: bool
) -> Mapping[str, LayerOffload]:
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
        limit = int(_FREE_SHARE * free_bytes)
        memory = memory.model_copy(update={"memory": limit})
    if memory.memory is None or memory.weights_home == "device":
        return {}
    models = _sizes(settings, has_own=has_own)
    rules = {
        "in_place": device.type == "cuda",
        "free_bytes": free_bytes,
        "step_tokens": settings.step.longest if device.type == "cpu" else None,
    }
    profile = with_link_bandwidth(
        machine_profile(settings.model.device, graphs=False), settings.schedule.link_bandwidth
    )
    workload = expected_workload(settings, models[0].shape.context)
    chosen = choose_offload(memory, models, workload, profile, rules)
    roles = zip(("generator", "verifier"), chosen, strict=False)
    moved = {role: model.offloaded for role, model in roles if model.offloaded is not None}
    if moved and settings.sparse.sparse != "off":
        needed = sum(model.all_weights for model in models)
        raise InputError(
            f"--sparse {settings.sparse.sparse} needs all weights on the device. They take "
            f"{format_bytes(needed)}: raise --memory."
        )
    on_disk = memory.weights_home == "disk" or (
        memory.weights_home == "auto" and device.type == "cpu"
    )
    needed, most = sum(each.home_bytes for each in moved.values()), host_memory_bytes()
    if not on_disk and needed > most:
        raise InputError(
            f"--weights-home host: {format_bytes(needed)} of weights do not fit in the "
            f"{format_bytes(most)} of host memory. Use smaller weights (--weights int4)."
        )

    def make(numbers: Sequence[int]) -> LayerOffload:
        home: WeightHome = FileHome() if on_disk else HostHome(device)
        own = Wire(wire.emulated_bandwidth) if on_disk else wire.with_own_counter()
        streams = CudaStreams(device) if device.type == "cuda" else HostStreams()
        return LayerOffload(numbers, home, StreamLink(streams, wire=own), str(device))

    return {role: make(each.numbers) for role, each in moved.items()}


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
