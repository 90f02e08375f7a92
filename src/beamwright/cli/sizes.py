"""What `plan` and `simulate` agree on: both models on a machine, and how memory is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from beamwright.cli.machine import Machine
from beamwright.cli.output import format_bytes
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.plan.cards import CARDS
from beamwright.plan.costs import ModelCosts, Storage, storage_of
from beamwright.plan.machines import CUSTOM, HardwareProfile, in_precision
from beamwright.sections import MemorySettings, ModelSettings
from beamwright.units import GIB

if TYPE_CHECKING:
    from beamwright.models import ModelShape
    from beamwright.solver.memory import MemoryPlan, ModelBytes

RESERVED_BYTES = GIB  # of a card: CUDA's context, captured steps and what a desktop shows
# Of an interpreter, beside the memory number on a CPU. Resident on Linux with torch 2.13 (CPU):
# 0.22 GiB with torch, this package and one product, 0.35 with tokenizers and the bundled pair.
INTERPRETER_BYTES = 4 * GIB // 10
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class SizedModel:
    """A model in its precision. sizes: in memory; costs: for the cost model."""

    name: str
    shape: ModelShape
    storage: Storage
    sizes: ModelBytes
    costs: ModelCosts


@dataclass(frozen=True)
class Models:
    """Generator and verifier on a machine. profile: in the precision of the models."""

    generator: SizedModel
    verifier: SizedModel | None
    profile: HardwareProfile

    @property
    def weight_bytes(self) -> int:
        """Weights of both."""
        verifier = 0 if self.verifier is None else self.verifier.sizes.weights
        return self.generator.sizes.weights + verifier

    def activation_bytes(self, num_rows: int) -> int:
        """Working memory: the two models never run at the same time."""
        both = [self.generator, *([] if self.verifier is None else [self.verifier])]
        return max(model.sizes.activations(num_rows) for model in both)


def read_models(settings: Settings, machine: Machine) -> Models:
    """The sizes of the models that the settings name; reads no weights.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading them would.
    """
    from beamwright.models.find import find_shape
    from beamwright.solver.memory import ModelBytes
    from beamwright.verify.find import find_verifier_shape

    model = settings.model
    element_bytes = _ELEMENT_BYTES.get(model.dtype, machine.profile.element_bytes)
    card = CARDS.get(machine.profile.name)
    has_kernel = element_bytes == 2 and model.dtype != "float16"
    has_kernel = has_kernel and (card is None or card.has_int4_kernel)

    def sized(name: str, shape: ModelShape, weights: str) -> SizedModel:
        storage = storage_of(weights, has_int4_kernel=has_kernel)
        sizes = ModelBytes(shape, element_bytes, storage)
        return SizedModel(name, shape, storage, sizes, ModelCosts.of(shape, element_bytes, storage))

    generator = sized(model.model, find_shape(model), model.weights)
    shape = find_verifier_shape(model)
    verifier = None if shape is None else sized(model.scorer, shape, model.verifier_weights)
    return Models(generator, verifier, in_precision(machine.profile, element_bytes))


def check_verifier_options(given: dict[str, object], model: ModelSettings) -> None:
    """Weights or memory of a verifier that is not there say nothing.

    Raises:
        InputError: if they are given.
    """
    from beamwright.verify.find import find_verifier_shape

    for name in ("verifier_weights", "split"):
        if name in given and find_verifier_shape(model) is None:
            option = name.replace("_", "-")
            raise InputError(f"--{option} needs --verifier with a model of its own")


@dataclass(frozen=True)
class Memory:
    """What a search may use. limit_bytes: of the device; plan: the KV of each model.

    has_copies: attention's working copies take as much again as KV; not where --kv-memory says
    what KV may use.
    """

    limit_bytes: int
    plan: MemoryPlan
    has_copies: bool


def is_card(profile: HardwareProfile) -> bool:
    """False of a CPU, whose memory no CUDA context shares."""
    return profile.name in CARDS or profile.name == CUSTOM


def split_memory(settings: Settings, models: Models) -> Memory:
    """As `solve --memory` does it; of a card at most what CUDA and the display leave.

    Raises:
        InputError: if that is more than the device has, or nothing is left for KV.
    """
    from beamwright.solver.memory import plan_memory

    memory, kv_memory = settings.memory.memory, settings.memory.kv_memory
    profile, num_rows = models.profile, settings.search.n
    device_bytes = profile.device_memory_bytes
    if memory is not None and memory > device_bytes:
        raise InputError(
            f"--memory {format_bytes(memory)}: {profile.name} has {format_bytes(device_bytes)}"
        )
    usable = device_bytes - (RESERVED_BYTES if is_card(profile) else 0)
    limit = usable if memory is None else min(memory, usable)
    where = f"{profile.name} has" if limit == device_bytes else "--memory is"
    if limit == usable < device_bytes:
        where = f"{profile.name} has {format_bytes(device_bytes)}, less what CUDA takes"
    weights, activations = models.weight_bytes, models.activation_bytes(num_rows)
    if kv_memory is not None and weights + kv_memory > limit:
        raise InputError(
            f"weights take {format_bytes(weights)} and --kv-memory "
            f"{format_bytes(kv_memory)}; {where} {format_bytes(limit)}"
        )
    if kv_memory is None and weights + activations >= limit - 1:
        raise InputError(
            f"weights take {format_bytes(weights)} and activations about "
            f"{format_bytes(activations)}; {where} {format_bytes(limit)}: nothing is left for KV"
            + ("; --verifier-device is for a second device" if models.verifier else "")
        )
    asked = MemorySettings(memory=limit, kv_memory=kv_memory, split=settings.memory.split)
    verifier = None if models.verifier is None else models.verifier.sizes
    plan = plan_memory(asked, models.generator.sizes, verifier, num_rows)
    return Memory(limit, plan, has_copies=kv_memory is None)
