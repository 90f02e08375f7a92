"""`beamwright plan`: what fits on a device and how fast it would be, before anything is loaded.

A verifier's weights and KV take their part of the memory where --verifier names one; the time is
the generator's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table

from beamwright.cli import engine
from beamwright.cli.options import Invocation, with_settings
from beamwright.cli.output import add_row, format_bytes, plain, print_json, quiet_stdout
from beamwright.config import ModelSettings, Settings
from beamwright.cost import (
    Estimate,
    LbsCase,
    ModelCosts,
    Storage,
    Workload,
    estimate,
    layerwise_bytes,
    locality_bytes,
    locality_printed_bytes,
    max_beams_in_gpu,
    storage_of,
)
from beamwright.errors import InputError
from beamwright.hardware import DEFAULT_PROFILE, HardwareProfile, find_profile

_GIB = 2**30
_DEFAULT_STEP_TOKENS = 32
_DEFAULT_GENERATE_TOKENS = 1920  # as in the LBS paper, with its prompt of 128
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OPTIONS = (
    "model", "dtype", "context", "weights", "verifier", "verifier_weights", "n", "width",
    "step_tokens", "memory", "kv_memory",
)  # fmt: skip

_PromptOption = Annotated[
    int, typer.Option("--prompt", metavar="TOKENS", min=1, help="Length of the prompt.")
]
_GenerateOption = Annotated[
    int | None,
    typer.Option(
        "--generate",
        metavar="TOKENS",
        min=1,
        help=f"Tokens of each path after it (default: {_DEFAULT_GENERATE_TOKENS}, or the context).",
    ),
]
_GpuOption = Annotated[
    str,
    typer.Option("--gpu", metavar="NAME", help="Hardware profile; measured is this machine's."),
]


@with_settings(only=_OPTIONS, recipe=False)
def plan(
    invocation: Invocation,
    prompt: _PromptOption = 128,
    generate: _GenerateOption = None,
    gpu: _GpuOption = DEFAULT_PROFILE,
) -> None:
    """Estimate memory, traffic and time of a search under each schedule. Loads no model.

    --model and --verifier take the name of a shape as well, such as opt-6.7b. Without --verifier
    all memory is the generator's.
    """
    profile = find_profile(gpu)
    if "verifier_weights" in invocation.given and "verifier" not in invocation.given:
        raise InputError("--verifier-weights needs --verifier")
    with quiet_stdout():
        verifier = _verifier(invocation, profile)
        report = _report(invocation.settings, profile, prompt, generate, verifier)
    if invocation.as_json:
        print_json(report)
    else:
        Console().print(_view(report))


@dataclass(frozen=True)
class _Verifier:
    """What a verifier takes of the device. activation_bytes: never at the generator's time."""

    name: str
    costs: ModelCosts
    activation_bytes: int


def _verifier(invocation: Invocation, profile: HardwareProfile) -> _Verifier | None:
    settings = invocation.settings.model
    shape = engine.find_verifier_shape(settings) if "verifier" in invocation.given else None
    if shape is None:
        return None
    element_bytes, storage = _kept(settings.verifier_weights, settings, profile)
    return _Verifier(
        name=settings.scorer,
        costs=ModelCosts.of(shape, element_bytes, storage),
        activation_bytes=engine.activation_bytes(
            shape, element_bytes, invocation.settings.search.n, storage
        ),
    )


def _kept(weights: str, settings: ModelSettings, profile: HardwareProfile) -> tuple[int, Storage]:
    """Bytes of an element, and how weights are kept; a GPU is taken to have int4's kernel."""
    element_bytes = _ELEMENT_BYTES.get(settings.dtype, profile.element_bytes)
    has_kernel = element_bytes == 2 and settings.dtype != "float16"
    return element_bytes, storage_of(weights, has_int4_kernel=has_kernel)


def _report(
    settings: Settings,
    profile: HardwareProfile,
    prompt: int,
    generate: int | None,
    verifier: _Verifier | None,
) -> dict[str, Any]:
    element_bytes, storage = _kept(settings.model.weights, settings.model, profile)
    shape = engine.find_shape(settings.model)
    workload = _workload(settings, shape.context, prompt, generate)
    model = ModelCosts.of(shape, element_bytes, storage)
    activations = engine.activation_bytes(shape, element_bytes, settings.search.n, storage)
    whole = _kv_budget_bytes(settings, profile, model, activations, verifier)
    budget = whole
    if verifier is not None:
        both = model.kv_bytes_per_token + verifier.costs.kv_bytes_per_token
        budget = whole * model.kv_bytes_per_token // both
    estimates = estimate(workload, model, profile, budget)
    return {
        "model": settings.model.model,
        "gpu": profile.name,
        "n": workload.num_beams,
        "width": workload.width,
        "prompt": workload.prompt_tokens,
        "generate": workload.generate_tokens,
        "step_tokens": workload.step_tokens,
        "weights": str(storage),
        "weight_bytes": model.weight_bytes,
        "weight_traffic_bytes": model.weight_bytes + model.conversion_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_budget_bytes": budget,
        "verifier": None if verifier is None else _verifier_report(verifier, whole - budget),
        "fits": estimates["in-gpu"].fits,
        "max_beams_in_gpu": max_beams_in_gpu(workload, model, budget),
        "analytic": _analytic(workload, model, budget),
        "schedules": {name: asdict(each) for name, each in estimates.items()},
    }


def _verifier_report(verifier: _Verifier, budget: int) -> dict[str, Any]:
    return {
        "model": verifier.name,
        "weight_bytes": verifier.costs.weight_bytes,
        "kv_bytes_per_token": verifier.costs.kv_bytes_per_token,
        "kv_budget_bytes": budget,
    }


def _workload(settings: Settings, context: int, prompt: int, generate: int | None) -> Workload:
    if generate is None:
        generate = min(_DEFAULT_GENERATE_TOKENS, context - prompt)
    if generate < 1 or prompt + generate > context:
        raise InputError(
            f"--prompt {prompt} and --generate {max(generate, 1)} tokens exceed the context "
            f"of {settings.model.model}, {context} tokens"
        )
    step_tokens = settings.step.step_tokens or min(_DEFAULT_STEP_TOKENS, generate)
    if step_tokens > generate:
        raise InputError(f"--step-tokens {step_tokens} is longer than --generate {generate}")
    search = settings.search
    return Workload(search.n, search.width, prompt, generate, step_tokens)


def _kv_budget_bytes(
    settings: Settings,
    profile: HardwareProfile,
    model: ModelCosts,
    activations: int,
    verifier: _Verifier | None = None,
) -> int:
    """--kv-memory, or what weights and activations leave of --memory or of the device's."""
    memory, kv_memory = settings.memory.memory, settings.memory.kv_memory
    device_bytes = profile.device_memory_bytes
    if memory is not None and memory > device_bytes:
        raise InputError(
            f"--memory {format_bytes(memory)}: {profile.name} has {format_bytes(device_bytes)}"
        )
    limit = device_bytes if memory is None else memory
    where = f"{profile.name} has" if memory is None else "--memory is"
    weights = model.weight_bytes
    if verifier is not None:
        weights += verifier.costs.weight_bytes
        activations = max(activations, verifier.activation_bytes)
    if kv_memory is not None:
        if weights + kv_memory > limit:
            raise InputError(
                f"weights take {format_bytes(weights)} and --kv-memory "
                f"{format_bytes(kv_memory)}; {where} {format_bytes(limit)}"
            )
        return kv_memory
    budget = limit - weights - activations
    if budget <= 0:
        raise InputError(
            f"weights take {format_bytes(weights)} and activations about "
            f"{format_bytes(activations)}; {where} {format_bytes(limit)}: nothing is left for KV"
        )
    return budget


def _analytic(workload: Workload, model: ModelCosts, budget: int) -> dict[str, float]:
    case = LbsCase(
        num_layers=model.num_layers,
        kv_bytes_per_token=model.kv_bytes_per_token,
        num_beams=workload.num_beams,
        prompt_tokens=workload.prompt_tokens,
        generate_tokens=workload.generate_tokens,
        step_tokens=workload.step_tokens,
        kv_budget_bytes=budget,
    )
    return {
        "layerwise_gib": layerwise_bytes(case) / _GIB,
        "locality_gib": locality_bytes(case) / _GIB,
        "locality_printed_gib": locality_printed_bytes(case) / _GIB,
    }


# --- for reading -----------------------------------------------------------------------------


def _view(report: Mapping[str, Any]) -> Group:
    facts = Table(show_header=False, box=None)
    for name, value in _facts(report):
        add_row(facts, name, value)
    title = (
        f"{report['model']} on {report['gpu']}, {report['n']} beams, width {report['width']}, "
        f"{report['prompt']} + {report['generate']} tokens in steps of {report['step_tokens']}"
    )
    schedules = Table(title=plain(title), title_justify="left", box=None, pad_edge=False)
    schedules.add_column("seconds, GiB", no_wrap=True)
    for column in ("time", "decode", "stall", "I/O", "in", "out", "groups", "peak KV"):
        schedules.add_column(column, justify="right", no_wrap=True)
    for name, content in report["schedules"].items():
        add_row(schedules, name, *_cells(Estimate(**content)))
    return Group(schedules, facts)


def _cells(each: Estimate) -> Iterator[str]:
    if not each.fits:
        yield "no fit"  # the other cells stay empty
        return
    for seconds in (each.time_s, each.decode_s, each.stall_s):
        yield _short(seconds or 0.0)
    yield f"{each.io_share:.0%}"
    for num_bytes in (each.h2d_bytes, each.d2h_bytes):
        yield _short((num_bytes or 0) / _GIB)
    yield f"{each.groups:,}"
    yield _short((each.peak_kv_bytes or 0) / _GIB)


def _short(number: float) -> str:
    """About three digits: an estimate has no more."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kept = "" if report["weights"] == "plain" else f" ({report['weights']})"
    yield "weights", format_bytes(report["weight_bytes"]) + kept
    yield "KV per token", format_bytes(report["kv_bytes_per_token"])
    yield "KV budget", format_bytes(report["kv_budget_bytes"])
    if report["verifier"] is not None:
        weights, kv = (
            format_bytes(report["verifier"][name]) for name in ("weight_bytes", "kv_budget_bytes")
        )
        yield "verifier", f"{weights} of weights, {kv} of KV"
    fits = "yes" if report["fits"] else "no"
    yield "fits with shared KV", f"{fits} (up to {report['max_beams_in_gpu']:,} beams would)"
    analytic = report["analytic"]
    yield "LBS Eq. 1-3", f"{analytic['layerwise_gib']:,.0f} GiB to the device, layer-wise"
    printed = f"{analytic['locality_printed_gib']:,.0f} as printed"
    yield "LBS Eq. 4-5", f"{analytic['locality_gib']:,.0f} GiB, group by group ({printed})"
