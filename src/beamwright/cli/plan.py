"""`beamwright plan`: what fits on a device and how fast it would be, before anything is loaded.

Generator and verifier are in every figure; the verifier scores in turn with decoding.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from rich.console import Console

from beamwright.cli.machine import (
    INTERPRETER_BYTES,
    LIST,
    RESERVED_BYTES,
    GpuOption,
    Machine,
    Memory,
    Models,
    SizedModel,
    check_verifier_options,
    find_machine,
    is_card,
    print_profiles,
    read_models,
    split_memory,
)
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import print_json, quiet_stdout
from beamwright.cli.plan_view import plan_view
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.models.config import find_shape
from beamwright.plan.compare import ResidentNeed, estimate, max_beams_in_gpu, resident_need
from beamwright.plan.schedules import Estimate, Scorer
from beamwright.plan.workload import Workload

_DEFAULT_STEP_TOKENS = 32
_DEFAULT_GENERATE_TOKENS = 1920  # as in the LBS paper, with its prompt of 128
_RESIDENT = "in-gpu/tree"
_SMALLER = (
    ("weights", "int8"), ("weights", "int4"), ("verifier_weights", "int8"),
    ("verifier_weights", "int4"),
)  # fmt: skip
_OPTIONS = (
    "model", "dtype", "context", "weights", "verifier", "verifier_weights", "n", "width",
    "step_tokens", "memory", "kv_memory", "split",
)  # fmt: skip

_PromptOption = Annotated[int, option("--prompt", "Length of the prompt.", "TOKENS", min=1)]
_GenerateOption = Annotated[
    int | None,
    option(
        "--generate",
        f"Tokens of each path after it (default: {_DEFAULT_GENERATE_TOKENS}, or the context).",
        "TOKENS",
        min=1,
    ),
]


@with_settings(only=_OPTIONS, recipe=False)
def plan(
    invocation: Invocation,
    prompt: _PromptOption = 128,
    generate: _GenerateOption = None,
    gpu: GpuOption = None,
) -> None:
    """Estimate memory, traffic and time of a search under each schedule. Loads no model.

    --model and --verifier take a model's name as well, such as qwen2.5-1.5b, or a folder with a
    config.json alone. Without --verifier all memory is the generator's.
    """
    if gpu == LIST:
        print_profiles(as_json=invocation.as_json)
        return
    with quiet_stdout():
        find_shape(invocation.settings.model)  # a refusal need not wait for torch
        machine = find_machine(gpu)
        check_verifier_options(invocation.given, invocation.settings.model)
        report = _report(invocation.settings, machine, prompt, generate)
    if invocation.as_json:
        print_json(report)
    else:
        Console().print(plan_view(report, machine))


def _report(
    settings: Settings, machine: Machine, prompt: int, generate: int | None
) -> dict[str, Any]:
    models = read_models(settings, machine)
    generator, verifier = models.generator, models.verifier
    workload = _workload(settings, generator.shape.context, prompt, generate)
    memory = split_memory(settings, models)
    budget = memory.plan.generator_kv_bytes
    split, scorer = settings.memory.split, None
    if verifier is not None:
        scorer = Scorer(verifier.costs, memory.plan.verifier_kv_bytes)
    estimates = estimate(workload, generator.costs, models.profile, budget, scorer)
    resident, most = estimates[_RESIDENT], _max_beams(workload, models, memory)
    if resident.fits:
        most, advice = max(most, workload.num_beams), "nothing has to change"
    else:  # what was sampled for this number rules what is reckoned from moderate ones
        most = min(most, workload.num_beams - workload.width)
        has_tier = estimates["locality/tree"].time_s is not None
        advice = _advice(settings, machine, workload, most, has_tier=has_tier)
    need = resident_need(workload, generator.costs, scorer and scorer.model)  # type: ignore[arg-type]
    return {
        "model": generator.name,
        "gpu": machine.profile.name,
        "gpu_source": machine.source,
        "n": workload.num_beams,
        "width": workload.width,
        "prompt": workload.prompt_tokens,
        "generate": workload.generate_tokens,
        "step_tokens": workload.step_tokens,
        "weights": str(generator.storage),
        "weight_bytes": generator.costs.weight_bytes,
        "weight_traffic_bytes": generator.costs.weight_bytes + generator.costs.conversion_bytes,
        "kv_bytes_per_token": generator.costs.kv_bytes_per_token,
        "kv_budget_bytes": budget,
        "verifier": None if verifier is None else _verifier_report(verifier, memory),
        "memory": _memory_report(models, memory, need, workload.num_beams, split),
        "fits": resident.fits,
        "borderline": resident.borderline and _mean_fits(need, memory),
        "max_beams_in_gpu": most,
        "advice": advice,
        "unscored_tokens": _unscored_tokens(verifier, workload),
        "schedules": {name: _schedule_report(name, each) for name, each in estimates.items()},
    }


def _mean_fits(need: ResidentNeed, memory: Memory) -> bool:
    """About half of the searches fit, or more."""
    verifier = 0 if need.verifier is None else need.verifier.mean
    plan = memory.plan
    return need.generator.mean <= plan.generator_kv_bytes and verifier <= plan.verifier_kv_bytes


def _max_beams(workload: Workload, models: Models, memory: Memory) -> int:
    plan, verifier = memory.plan, models.verifier
    scorer = None if verifier is None else Scorer(verifier.costs, plan.verifier_kv_bytes)
    return max_beams_in_gpu(workload, models.generator.costs, plan.generator_kv_bytes, scorer)


def _advice(
    settings: Settings, machine: Machine, workload: Workload, most: int, *, has_tier: bool
) -> str:
    """The cheapest change with which all beams fit: smaller weights, fewer beams, host memory."""
    for name, value in _SMALLER:
        changed = settings.model.model_copy(update={name: value})
        smaller = settings.model_copy(update={"model": changed})
        models = read_models(smaller, machine)
        try:
            beams = _max_beams(workload, models, split_memory(smaller, models))
        except InputError:  # still too large
            continue
        if beams >= workload.num_beams:
            return f"--{name.replace('_', '-')} {value} makes it {beams:,}"
    ways = [f"about --n {most}"] if most > 0 else []
    ways += ["--schedule locality keeps the rest in host memory"] if has_tier else []
    return ", or ".join(ways) or "shorter steps, a smaller --width or smaller models may"


def _schedule_report(name: str, each: Estimate) -> dict[str, Any]:
    schedule, _, layout = name.partition("/")
    return {"schedule": schedule, "attention": layout, **asdict(each)}


def _verifier_report(verifier: SizedModel, memory: Memory) -> dict[str, Any]:
    return {
        "model": verifier.name,
        "weights": str(verifier.storage),
        "weight_bytes": verifier.costs.weight_bytes,
        "kv_bytes_per_token": verifier.costs.kv_bytes_per_token,
        "kv_budget_bytes": memory.plan.verifier_kv_bytes,
    }


def _memory_report(
    models: Models, memory: Memory, need: ResidentNeed, num_beams: int, split: str | float
) -> dict[str, Any]:
    """What everything resident takes, least and most over single searches, beside the limit."""
    from beamwright.solver.memory import memory_needed

    verifier = need.verifier

    def needed(generator_kv: int, verifier_kv: int) -> int:
        sizes = None if models.verifier is None else models.verifier.sizes
        return memory_needed(
            (models.generator.sizes, sizes),
            (generator_kv, verifier_kv),
            num_beams,
            has_copies=memory.has_copies,
            split=split,
        )

    least = needed(need.generator.least, 0 if verifier is None else verifier.least)
    most = needed(need.generator.worst, 0 if verifier is None else verifier.worst)
    fixed = models.weight_bytes + models.activation_bytes(num_beams)
    limit = memory.limit_bytes if memory.has_copies else fixed + memory.plan.kv_bytes
    on_card = is_card(models.profile)
    kv_bytes = need.generator.worst + (0 if verifier is None else verifier.worst)
    return {
        "limit_bytes": limit,
        "device_bytes": models.profile.device_memory_bytes,
        "least_bytes": least,
        "needed_bytes": most,
        "generator_weight_bytes": models.generator.sizes.weights,
        "verifier_weight_bytes": models.weight_bytes - models.generator.sizes.weights,
        "activation_bytes": models.activation_bytes(num_beams),
        "generator_kv_bytes": need.generator.worst,
        "verifier_kv_bytes": None if verifier is None else verifier.worst,
        "copies_bytes": most - fixed - kv_bytes,
        "left_bytes": max(0, limit - most),
        "outside_bytes": models.profile.device_memory_bytes - limit,
        "kv_memory_given": not memory.has_copies,
        "reserved_bytes": RESERVED_BYTES if on_card else 0,
        "interpreter_bytes": 0 if on_card else INTERPRETER_BYTES,
    }


def _unscored_tokens(verifier: SizedModel | None, workload: Workload) -> int | None:
    """How far the longest path goes beyond the verifier's context; None without one."""
    if verifier is None:
        return None
    longest = workload.prompt_tokens + workload.generate_tokens + workload.num_steps
    return max(0, longest - verifier.shape.context)


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
