"""Resolve `--gpu`: the machine to estimate for, both models on it, and the split of its memory.

`plan` and `simulate` share this module. `print_profiles` prints the table for `--gpu list`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group

from beamwright.cli.options import option
from beamwright.cli.output import add_row, figures_table, print_json, short_number
from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.plan.costs import ModelCosts, Roofline, library_storage, storage_of
from beamwright.plan.machines import (
    CARDS,
    CUSTOM,
    DEFAULT_PROFILE,
    MEASURED,
    NAMED_PROFILES,
    HardwareProfile,
    card_of_device,
    card_profile,
    find_profile,
    for_element_bytes,
    with_cuda_graphs,
)
from beamwright.sections import MemorySettings
from beamwright.units import GIB

if TYPE_CHECKING:
    from beamwright.models.shape import ModelShape
    from beamwright.plan.times import Estimate
    from beamwright.plan.workload import Workload
    from beamwright.solver.memory import MemoryPlan
    from beamwright.solver.model_bytes import ModelBytes


LIST = "list"
_SHEET = "data sheet, not measured"
_CPU_SOURCE = "two cores of a server CPU, measured once"

GPU = option(
    None,
    "Hardware profile: list shows all; measured or cpu is this machine (doctor --probe); "
    "custom:12GB,360GB/s,25TFLOPS is a card with this memory, memory bandwidth and dense "
    f"16-bit rate (default: this machine's CUDA device, else {DEFAULT_PROFILE}).",
    "NAME",
)


@dataclass(frozen=True)
class Machine:
    """The machine of an estimate: a hardware profile and the source of its figures.

    why: reason, as text, why this profile was chosen without --gpu; None with --gpu.
    """

    profile: HardwareProfile
    source: str
    why: str | None = None


def find_machine(name: str | None) -> Machine:
    """Return the machine that `--gpu` names.

    Without a name, return this machine's CUDA device, or a default profile if it has none.

    Raises:
        InputError: for an unknown name, or for `measured` before `doctor --probe` has run here.
    """
    if name is not None:
        return _known(find_profile(name))
    instead = f"figures are for {DEFAULT_PROFILE}. --gpu list shows other profiles."
    device = cuda_name_and_memory()
    if device is None:
        why = f"no --gpu given and no CUDA device found: {instead}"
        return _known(find_profile(DEFAULT_PROFILE), why)
    device_name, memory_bytes = device
    card = card_of_device(device_name, memory_bytes)
    if card is None:
        why = f"no --gpu given and no profile of this machine's {device_name}: {instead}"
        return _known(find_profile(DEFAULT_PROFILE), why)
    why = f"no --gpu given: figures are for this machine's {device_name}, by its data sheet"
    return _known(replace(card_profile(card), device_memory_bytes=memory_bytes), why)


def _known(profile: HardwareProfile, why: str | None = None) -> Machine:
    return Machine(profile, _source_of(profile.name), why)


def cuda_name_and_memory() -> tuple[str, int] | None:
    """Return the name and the memory in bytes of the first CUDA device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return str(found.name), int(found.total_memory)


def _source_of(name: str) -> str:
    if name in CARDS:
        return f"{CARDS[name].source}; {_SHEET}"
    if name == CUSTOM:
        return "as given, with an assumed PCIe 4.0 x16 link"
    return _CPU_SOURCE if name in NAMED_PROFILES else "measured on this machine by doctor --probe"


def print_profiles(*, as_json: bool) -> None:
    """Print all hardware profiles with their sources, for `--gpu list`."""
    if as_json:
        profiles = [
            {**asdict(profile), "source": _source_of(name)}
            for name, profile in NAMED_PROFILES.items()
        ]
        print_json({"profiles": profiles})
        return
    columns = ("memory", "GB/s", "16-bit TFLOP/s", "link GB/s")
    table = figures_table("--gpu", columns, f"Profiles ({_SHEET}, except the CPU)")
    for name, profile in NAMED_PROFILES.items():
        rates = (profile.device_bandwidth / 1e9, profile.flops / 1e12, profile.h2d_bandwidth / 1e9)
        memory = format_bytes(profile.device_memory_bytes).replace(".0", "")
        add_row(table, name, memory, *map(short_number, rates))
    rest = (
        f"{MEASURED} or cpu: this machine's CPU, as `beamwright doctor --probe` measured it",
        "custom:12GB,360GB/s,25TFLOPS: any card, by memory, GB/s and 16-bit TFLOP/s",
        "estimates use 82 % of a card's link bandwidth; --json shows the sources",
    )
    Console().print(Group(table, *rest))


# Bytes of a GPU's memory that CUDA's context, captured CUDA graphs and the display use.
_RESERVED_BYTES = GIB
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class SizedModel:
    """A model in a given precision: its name, its bytes in memory, and its costs of computing."""

    name: str
    sizes: ModelBytes
    costs: ModelCosts


@dataclass(frozen=True)
class EstimateModels:
    """Generator and verifier of an estimate. profile: the machine in the models' precision."""

    generator: SizedModel
    verifier: SizedModel | None
    profile: HardwareProfile

    @property
    def sizes(self) -> tuple[ModelBytes, ModelBytes | None]:
        """The sizes of generator and verifier in bytes, as arguments for `solver.memory`."""
        return self.generator.sizes, None if self.verifier is None else self.verifier.sizes

    def memory_rules(self, settings: Settings) -> dict[str, Any]:
        """Return keyword arguments of `plan_memory`, which depend on the machine and the models.

        On a GPU, attention of hybrid models reads KV in place, without working copies. For other
        models the plan includes the copies, so that it holds for every attention backend, unless
        weights are offloaded: then kernels are assumed. Without a GPU, `--memory` also covers the
        rows' tails (a row's newest KV, not yet in blocks), which hold at most one step.
        """
        if not _is_card(self.profile):
            return {"in_place": False, "step_tokens": settings.step.longest}
        offloads = any(each is not None and each.offloaded is not None for each in self.sizes)
        return {"in_place": self.generator.costs.state_bytes > 0 or offloads, "step_tokens": None}


def read_models(settings: Settings, machine: Machine) -> EstimateModels:
    """Return the sizes of the models that the settings name, without reading any weights.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: the error that loading would raise.
    """
    from beamwright.models.hf_config import find_shape
    from beamwright.solver.model_bytes import ModelBytes
    from beamwright.verify.find import find_verifier_shape

    model, profile = settings.model, machine.profile
    element_bytes = _ELEMENT_BYTES.get(model.dtype, profile.element_bytes)

    def sized(
        name: str, shape: ModelShape, weights: str, *, scores: bool = False, parts: int = 1
    ) -> SizedModel:
        storage = storage_of(weights, is_packed=shape.packed is not None)
        if profile.coded_flops is not None:
            storage = library_storage(storage, shape)
        sizes = ModelBytes(shape, element_bytes, storage, model.kv_dtype, scores, parts)
        costs = sizes.costs
        if profile.name in CARDS and not CARDS[profile.name].has_kernels:
            costs = replace(costs, quantised_gemm_rows=0)
        return SizedModel(name, sizes, costs)

    generator = sized(model.model, find_shape(model), model.weights)
    shape, count = find_verifier_shape(model), settings.schedule.verifiers
    verifier = None
    if shape is not None:
        kept, scores = model.verifier_weights, _is_card(profile)
        verifier = sized(model.verifier_or_default, shape, kept, scores=scores, parts=count)
    elif (model.verifier_weights, settings.memory.split, count) != ("auto", "auto", 1):
        options = "--verifier-weights, --split and --verifiers"
        raise InputError(f"{options} have no effect if --verifier is not a model; leave them out")
    here = for_element_bytes(profile, element_bytes)
    return EstimateModels(generator, verifier, with_cuda_graphs(here) if _is_card(here) else here)


def _is_card(profile: HardwareProfile) -> bool:
    return profile.name in CARDS or profile.name == CUSTOM


def _limited(settings: Settings, profile: HardwareProfile) -> MemorySettings:
    """Return the memory settings with the limit of a search's device memory.

    On a GPU, the limit leaves `_RESERVED_BYTES` to CUDA and the display.

    Raises:
        InputError: if --memory exceeds the device's memory.
    """
    asked, device_bytes = settings.memory, profile.device_memory_bytes
    limit = device_bytes - (_RESERVED_BYTES if _is_card(profile) else 0)
    if asked.memory is not None:
        if asked.memory > device_bytes:
            has = f"{profile.name} has {format_bytes(device_bytes)}"
            raise InputError(f"--memory is {format_bytes(asked.memory)}, but {has}")
        limit = min(asked.memory, limit)
    return asked.model_copy(update={"memory": limit})


def offload_layers(
    settings: Settings, models: EstimateModels, workload: Workload
) -> EstimateModels:
    """Return the models with the layers off the device for which `solve` finds no memory.

    Raises:
        InputError: if --memory exceeds the device's memory.
    """
    from beamwright.solver.offload import choose_offload

    present = [each for each in (models.generator, models.verifier) if each is not None]
    memory, rules = _limited(settings, models.profile), models.memory_rules(settings)
    sizes = [each.sizes for each in present]
    chosen = choose_offload(memory, sizes, workload, models.profile, rules)
    moved = [
        replace(
            each,
            sizes=sizes,
            costs=replace(each.costs, offloaded_bytes=sizes.costs.offloaded_bytes),
        )
        for each, sizes in zip(present, chosen, strict=True)
    ]
    verifier = moved[1] if len(moved) > 1 else None
    return replace(models, generator=moved[0], verifier=verifier)


def split_memory(settings: Settings, models: EstimateModels) -> tuple[int, MemoryPlan]:
    """Return the limit of a search's device memory in bytes, and its memory plan.

    `solve` makes the same plan for this limit.

    Raises:
        InputError: if --memory exceeds the device's memory, or no memory is left for KV.
    """
    from beamwright.solver.memory import plan_memory

    asked, profile = _limited(settings, models.profile), models.profile
    assert asked.memory is not None
    try:
        rules = models.memory_rules(settings)
        return asked.memory, plan_memory(asked, *models.sizes, settings.search.n, **rules)
    except InputError as error:
        device = format_bytes(profile.device_memory_bytes)
        raise InputError(f"{profile.name}, {device}: {error}") from error


def offload_report(
    models: EstimateModels, workload: Workload, estimate: Estimate
) -> dict[str, dict[str, Any]]:
    """Return a report on each model whose weights do not all fit the device, by role.

    token_s: seconds in which all paths get a token, and link_share: the share of this time in which
        weights are copied. Both are None for a verifier.
    """
    found = {}
    for role, model in (("generator", models.generator), ("verifier", models.verifier)):
        if model is None or (moved := model.sizes.offloaded) is None:
            continue
        token_s = share = None
        if role == "generator" and estimate.decode_s is not None:
            token_s = estimate.decode_s / workload.generate_tokens
            groups = (estimate.groups or 0) / workload.num_steps
            share = min(
                1.0,
                groups
                * Roofline(model.costs, models.profile).offload_s(workload.num_beams)
                / token_s,
            )
        found[role] = {
            "layers": model.sizes.shape.layers,
            "layers_off_device": len(moved.numbers),
            "home_bytes": moved.home_bytes,
            "pass_bytes": moved.pass_bytes,
            "device_bytes": model.sizes.weights,
            "token_s": token_s,
            "link_share": share,
        }
    return found


def offload_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each model in `offload_report`. report: the content of `plan --json`."""
    for role, each in report["offload"].items():
        stays = each["layers"] - each["layers_off_device"]
        line = (
            f"{role}: {stays} of {each['layers']} layers stay on the device; "
            f"up to {format_bytes(each['pass_bytes'])} of weights are copied there for each pass"
        )
        if each["token_s"] is not None:
            line += (
                f"; {report['n']} paths, {short_number(each['token_s'])} s a token, of which link "
                f"{each['link_share']:.0%}"
            )
        yield line
