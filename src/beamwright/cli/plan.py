"""`beamwright plan`: estimates a search's memory and time on a device without loading a model.

All figures include the generator and the verifier. The estimate assumes that decoding and scoring
alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from beamwright.cli.machine import (
    GPU,
    LIST,
    EstimateModels,
    Machine,
    SizedModel,
    find_machine,
    offload_layers,
    offload_lines,
    offload_report,
    print_profiles,
    read_models,
    split_memory,
)
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import (
    add_row,
    figures_table,
    plain,
    print_json,
    quiet_stdout,
    short_number,
)
from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.models.hf_config import find_shape
from beamwright.plan.costs import Roofline
from beamwright.plan.fits import ResidentKVNeed, VerifierCosts, max_beams_in_gpu, resident_kv_need
from beamwright.plan.machines import cpu_profile, for_element_bytes
from beamwright.plan.rounds import predict_generation
from beamwright.plan.sparse import SparseChoice, choose_sparse
from beamwright.plan.times import estimate
from beamwright.plan.workload import Workload
from beamwright.registry import flag_of
from beamwright.search import make_strategy, strategy_entry
from beamwright.search.self_aggregation import Aggregate, expected_prefills
from beamwright.units import GIB

if TYPE_CHECKING:
    from beamwright.solver.memory import MemoryPlan

_DEFAULT_STEP_TOKENS = 32
_DEFAULT_GENERATE_TOKENS = 1920  # as in the LBS paper, which has prompts of 128 tokens
_RESIDENT = "in-gpu/tree"
_SMALLER = (
    ("weights", "int8"), ("weights", "int4"), ("verifier_weights", "int8"),
    ("verifier_weights", "int4"),
)  # fmt: skip
_OPTIONS = (
    "model", "dtype", "context", "decoder", "weights", "verifier", "verifier_weights", "search",
    "n", "width", "step_tokens", "max_step_tokens", "max_rounds", "memory", "kv_memory", "split",
    "kv_dtype", "select", "verifiers", "weights_home",
)  # fmt: skip
_MEANINGS = (
    "in-gpu: all KV stays on the device. locality: groups in turn, each to the end of its step. "
    "tree: shared KV is stored once. loaded: GiB of KV from host memory."
)
_STATES = "MiB/row: states of recurrent layers. KV includes one for each row and each parent node."


@with_settings(only=_OPTIONS, recipe=False)
def plan(
    invocation: Invocation,
    prompt: int = option(128, "Length of the prompt.", "TOKENS", min=1),
    generate: int | None = option(
        None,
        f"Tokens of a path after the prompt (default: {_DEFAULT_GENERATE_TOKENS}, or what fits).",
        "TOKENS",
        min=1,
    ),
    gpu: str | None = GPU,
) -> None:
    """Estimate memory, traffic and time of a search under each schedule. Loads no model.

    --model and --verifier also take the name of a known model, such as qwen2.5-1.5b, or a folder
    that has only a config.json. Without --verifier the generator gets all memory.
    """
    if gpu == LIST:
        print_profiles(as_json=invocation.as_json)
        return
    with quiet_stdout():
        find_shape(invocation.settings.model)  # refuse a wrong model before the import of torch
        machine = find_machine(gpu)
        report = _report(invocation.settings, machine, prompt, generate)
    if invocation.as_json:
        print_json(report)
    else:
        Console().print(_page(report, machine))


def _report(
    settings: Settings, machine: Machine, prompt: int, generate: int | None
) -> dict[str, Any]:
    models = read_models(settings, machine)
    workload = _workload(settings, models.generator.sizes.shape.context, prompt, generate)
    models = offload_layers(settings, models, workload)
    costs = models.generator.costs.at_path_length(workload.longest, workload.step_tokens)
    models = replace(models, generator=replace(models.generator, costs=costs))
    limit, budgets, scorer = _budgets(settings, models)
    budget = budgets.generator_kv_bytes
    estimates = estimate(workload, costs, models.profile, budget, scorer)
    resident = estimates[_RESIDENT]
    most = max_beams_in_gpu(workload, costs, budget, scorer)
    if resident.fits:
        most, advice = max(most, workload.num_beams), "your settings fit as they are"
    else:
        # `resident` was sampled for exactly this number of beams, but `max_beams_in_gpu` is an
        # extrapolation from fewer beams. If both disagree, trust `resident`.
        most = min(most, workload.num_beams - workload.width)
        has_tier = estimates["locality/tree"].time_s is not None
        advice = _advice(settings, machine, workload, most, has_tier=has_tier)
    need = resident_kv_need(workload, costs, scorer)
    mean_fits = need.generator.mean <= budget
    mean_fits = mean_fits and (scorer is None or need.verifier.mean <= scorer.kv_budget_bytes)
    return {
        **_about(models.generator, budget),
        "gpu": machine.profile.name,
        "gpu_source": machine.source,
        "n": workload.num_beams,
        "width": workload.width,
        "prompt": workload.prompt_tokens,
        "generate": workload.generate_tokens,
        "step_tokens": workload.step_tokens,
        "weight_traffic_bytes": round(costs.weight_traffic_bytes(workload.num_beams)),
        "verifier": models.verifier and _about(models.verifier, budgets.verifier_kv_bytes),
        "memory": _memory_report(settings, models, workload, need, limit, budgets.kv_bytes),
        "offload": offload_report(models, workload, estimates["locality/tree"]),
        "fits": resident.fits,
        "borderline": resident.borderline and mean_fits,
        "max_beams_in_gpu": most,
        "advice": advice,
        "sparse_auto": asdict(_sparse(settings, machine, models, workload, budget, scorer)),
        **_later_generations(settings, workload, Roofline(costs, models.profile), budget),
        "schedules": {
            name: {"schedule": schedule, "attention": layout, **asdict(each)}
            for name, each in estimates.items()
            for schedule, layout in [name.split("/")]
        },
    }


def _budgets(
    settings: Settings, models: EstimateModels
) -> tuple[int, MemoryPlan, VerifierCosts | None]:
    """Return the memory limit, the KV budgets, and the verifier with its KV budget.

    The last value is None without a verifier. Parallel verifiers share their KV equally.
    """
    limit, budgets = split_memory(settings, models)
    if models.verifier is None:
        return limit, budgets, None
    part = budgets.verifier_kv_bytes // models.verifier.sizes.parts
    return limit, budgets, VerifierCosts(models.verifier.costs, part)


def _sparse(
    settings: Settings,
    machine: Machine,
    models: EstimateModels,
    workload: Workload,
    budget: int,
    scorer: VerifierCosts | None,
) -> SparseChoice:
    """Return the method that `--sparse auto` would choose, and the reason for this choice."""
    costs, shape = models.generator.costs, models.generator.sizes.shape
    if shape.groups or shape.states or settings.model.kv_dtype != "auto":
        return SparseChoice(
            "off", "attention windows, recurrent states and 8-bit KV are not supported"
        )
    plain = Roofline(costs, for_element_bytes(machine.profile, costs.element_bytes))
    known = Roofline(costs, models.profile), plain, cpu_profile(), budget
    return choose_sparse(workload, *known, settings.sparse.select, scorer)


def _later_generations(
    settings: Settings, workload: Workload, roofline: Roofline, budget: int
) -> dict[str, Any]:
    """Return a report on the generations after the first one, for `--search aggregate` only."""
    strategy = make_strategy(settings.search)
    if not isinstance(strategy, Aggregate):
        return {}
    n, size = workload.num_beams, min(strategy.aggregate_size, workload.num_beams)
    each = predict_generation(workload, size, expected_prefills(n, size), roofline, budget)
    return {"later_generations": {"rounds": strategy.aggregate_rounds, **asdict(each)}}


def _about(model: SizedModel, kv_budget_bytes: int) -> dict[str, Any]:
    return {
        "model": model.name,
        "weights": str(model.sizes.storage),
        "weight_bytes": model.costs.weight_bytes,
        "kv_bytes_per_token": model.costs.kv_bytes_per_token,
        "state_bytes": model.costs.state_bytes,
        "kv_budget_bytes": kv_budget_bytes,
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
        raise InputError(
            f"--step-tokens {step_tokens} exceeds --generate {generate}; lower --step-tokens or "
            "raise --generate"
        )
    # Without a width, no path has several children, so all of them differ from their first token.
    width = settings.search.width if strategy_entry(settings.search).reads_width else 1
    return Workload(settings.search.n, width, prompt, generate, step_tokens)


def _advice(
    settings: Settings, machine: Machine, workload: Workload, most: int, *, has_tier: bool
) -> str:
    """Return advice on how to fit all beams, the cheapest change first.

    Smaller weights are tried first, then fewer beams or host memory are proposed.
    most: number of beams that fit. has_tier: True if host memory can hold the other beams' KV.
    """
    for name, value in _SMALLER:
        changed = settings.model.model_copy(update={name: value})
        smaller = settings.model_copy(update={"model": changed})
        try:
            models = read_models(smaller, machine)
            _, budgets, scorer = _budgets(smaller, models)
        except InputError:  # even smaller weights are too large, or there is no verifier
            continue
        costs, budget = models.generator.costs, budgets.generator_kv_bytes
        beams = max_beams_in_gpu(workload, costs, budget, scorer)
        if beams >= workload.num_beams:
            return f"{flag_of(name)} {value} allows {beams:,}"
    ways = [f"use about --n {most}"] if most > 0 else []
    ways += ["use --schedule locality, which keeps the rest in host memory"] if has_tier else []
    return ", or ".join(ways) or "use shorter steps, a smaller --width or smaller models"


def _memory_report(
    settings: Settings,
    models: EstimateModels,
    workload: Workload,
    need: ResidentKVNeed,
    limit: int,
    kv_bytes: int,
) -> dict[str, Any]:
    """Return the memory that a search with all KV on the device needs, and the limit, in bytes.

    Trees differ, so the need has a minimum and a maximum. Attention's working copies are included
    unless --kv-memory sets the KV budget. The value `least_kv_bytes` is the KV memory that holds
    any single path of this search; with less, the search may be refused.
    """
    from beamwright.solver.memory import least_kv_bytes, memory_needed, weights_and_activations

    present = [model for model in models.sizes if model is not None]
    num_beams, has_copies = settings.search.n, settings.memory.kv_memory is None
    weights, activations = weights_and_activations(present, num_beams)
    step = settings.step.model_copy(update={"max_tokens": workload.generate_tokens})
    search = settings.model_copy(update={"step": step})
    rules: dict[str, Any] = {"has_copies": has_copies, "split": settings.memory.split}
    rules |= models.memory_rules(settings)
    both = need.generator, need.verifier
    kv_needs = zip(*((each.least, each.worst) for each in both), strict=True)
    least, most = (memory_needed(models.sizes, kv, num_beams, **rules) for kv in kv_needs)
    scored = present[-1].parts * need.verifier.worst  # 0 without a verifier
    return {
        "limit_bytes": limit if has_copies else weights + activations + kv_bytes,
        "device_bytes": models.profile.device_memory_bytes,
        "least_bytes": least,
        "needed_bytes": most,
        "least_kv_bytes": least_kv_bytes(search, present, workload.prompt_tokens),
        "generator_weight_bytes": present[0].weights,
        "verifier_weight_bytes": weights - present[0].weights,
        "activation_bytes": activations,
        "generator_kv_bytes": need.generator.worst,
        "verifier_kv_bytes": None if models.verifier is None else scored,
        "copies_bytes": most - weights - activations - need.generator.worst - scored,
    }


# --- the page: the answer, the total and its parts, then the times ---------------------------


def _page(report: Mapping[str, Any], machine: Machine) -> Group:
    """Return the printed page. report: the content of `--json`."""
    how = "up to" if report["fits"] else "about"
    answer = f"{how} {report['max_beams_in_gpu']:,} paths fit; {report['advice']}"
    budgets = f"{format_bytes(report['kv_budget_bytes'])} of KV for the generator"
    if report["verifier"] is not None:
        budgets += f", {format_bytes(report['verifier']['kv_budget_bytes'])} for the verifier"
    least = format_bytes(report["memory"]["least_kv_bytes"])
    parts: list[RenderableType | None] = [
        *(answer, _total(report), _memory_table(report), ""),
        *(_schedule_table(report), _MEANINGS, _STATES if report["state_bytes"] else None, ""),
        *offload_lines(report),
        _generations(report),
        "--sparse auto: {method} ({why})".format_map(report["sparse_auto"]),
        f"{budgets}; any path fits in {least} of KV (--kv-memory)",
        machine.why,
        f"{machine.profile.name}: {machine.source}",
    ]
    shown = (part for part in parts if part is not None)
    return Group(*(plain(part) if isinstance(part, str) else part for part in shown))


def _total(report: Mapping[str, Any]) -> str:
    """Return one line that compares the memory needed with the limit, and says whether it fits."""
    memory, schedules = report["memory"], report["schedules"]
    least, most, limit = (_gib(memory[f"{name}_bytes"]) for name in ("least", "needed", "limit"))
    if report["fits"]:
        return f"needs {most} of {limit} GiB: fits"
    if report["borderline"]:
        return (
            f"needs {least} to {most} of {limit} GiB: borderline "
            "(searches differ; the largest need host memory)"
        )
    rest = "even one path does not fit"
    if schedules["locality/tree"]["time_s"] is not None:
        rest = "locality keeps the rest in host memory (below)"
    return f"needs {least} of {limit} GiB: does not fit; {rest}"


def _generations(report: Mapping[str, Any]) -> str | None:
    """Return a line on the later generations of `--search aggregate`; None for another search."""
    if (each := report.get("later_generations")) is None:
        return None
    fits = "" if each["fits"] else " (more than the KV budget)"
    return (
        f"{each['rounds']} later generations, each: {report['n']} prompts of "
        f"{each['prompt_tokens']:,} tokens; {each['prefill_tokens']:,} of "
        f"{each['unshared_tokens']:,} tokens are computed, the others are shared; "
        f"{format_bytes(each['kv_bytes'])} of KV{fits}; "
        f"{seconds_text(each['prefill_s'])} of prefill and {seconds_text(each['decode_s'])} of "
        "decoding"
    )


def _gib(number: int) -> str:
    gib = number / GIB
    return f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2g}"


def _memory_table(report: Mapping[str, Any]) -> Table:
    memory = report["memory"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("GiB")
    states = ("MiB/row",) if report["state_bytes"] else ()
    for column in ("weights", "KV", "KiB/token", *states):
        table.add_column(column, justify="right", no_wrap=True)
    for role, model in (("generator", report), ("verifier", report["verifier"])):
        if model is not None:
            kept = "" if model["weights"] == "plain" else f" ({model['weights']})"
            add_row(
                table,
                f"{role} {model['model']}{kept}",
                _gib(model["weight_bytes"]),
                _gib(memory[f"{role}_kv_bytes"]),
                f"{model['kv_bytes_per_token'] / 1024:g}",
                *(f"{model['state_bytes'] / 1024**2:.5g}" for _ in states),
            )
    add_row(table, "activations", _gib(memory["activation_bytes"]))
    if memory["copies_bytes"] > GIB / 100:
        add_row(table, "attention's working copies of KV", "", _gib(memory["copies_bytes"]))
    return table


def _schedule_table(report: Mapping[str, Any]) -> Table:
    title = (
        f"{report['n']} beams, width {report['width']}, {report['prompt']} + {report['generate']} "
        f"tokens in steps of {report['step_tokens']} on {report['gpu']}"
    )
    table = figures_table("seconds", ("total", "decode", "verify", "stall", "loaded"), title)
    table.add_column("limited by", no_wrap=True)
    for each in report["schedules"].values():
        add_row(table, f"{each['schedule']}, {each['attention']}", *_cells(each))
    return table


def _cells(each: Mapping[str, Any]) -> Iterator[str]:
    if each["time_s"] is None:
        yield "no fit"  # rich leaves the missing cells of a row empty
        return
    for name in ("time_s", "decode_s", "verify_s", "stall_s"):
        yield seconds_cell(each[name])
    yield short_number(each["h2d_bytes"] / GIB)
    yield "memory: borderline" if each["borderline"] else each["limited_by"]


def seconds_cell(seconds: float) -> str:
    """Format a time for a table of seconds; only minutes and hours get a unit.

    Examples: 38 becomes `38.0`, 2280 becomes `38 min`.
    """
    return seconds_text(seconds).removesuffix(" s")


def seconds_text(seconds: float) -> str:
    """Format a time with its unit: seconds, from ten minutes on minutes, from two hours on hours.

    Examples: 38 becomes `38.0 s`, 2280 becomes `38 min`.
    """
    if seconds < 600:
        return f"{short_number(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{short_number(seconds / 3600)} h"
