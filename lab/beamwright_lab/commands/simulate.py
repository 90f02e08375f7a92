"""`beamwright simulate`: simulate one search under several schedules, on any GPU, without a GPU.

The engine's scheduling code runs on a virtual clock. The tree is recorded from a real search, or
made up. Decoding and scoring take turns; selection and pruning take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from beamwright.cli.machine import (
    GPU,
    LIST,
    EstimateModels,
    Machine,
    find_machine,
    print_profiles,
    read_models,
    split_memory,
)
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import print_json, quiet_stdout
from beamwright.config import Settings
from beamwright.counters import Progress
from beamwright.declare import declared_values
from beamwright.errors import CapacityError, InputError
from beamwright.plan.costs import Layout, Roofline
from beamwright.plan.machines import with_link_bandwidth
from beamwright.registry import did_you_mean
from beamwright.schedule import SCHEDULES, make_schedule, schedule_entry
from beamwright.sections import ScheduleSettings, SparseSettings, Speculation
from beamwright_lab.baselines.layerwise.declare import streams_layers
from beamwright_lab.commands.simulate_case import Case, find_case
from beamwright_lab.commands.simulate_engines import ENGINES_OPTION, engines_beside, named_engines
from beamwright_lab.commands.simulate_progress import SimulationBar, simulation_bar
from beamwright_lab.commands.simulate_view import comparison_view

if TYPE_CHECKING:
    from beamwright.solver.memory import MemoryPlan

_BASELINES = {layout: f"layerwise/{layout}" for layout in Layout}
_OPTIONS = (
    "model", "dtype", "context", "weights", "verifier", "verifier_weights", "n", "width",
    "search", "seed", "step_tokens", "memory", "kv_memory", "split", "link_bandwidth",
    "max_batch", "batching", "speculation", "verify_ahead", "write_back", "sparse",
    "select", "sparse_from", "kv_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """A row of the report: a schedule's settings and the KV layout that attention reads."""

    layout: Layout
    settings: ScheduleSettings


_PARTS: Mapping[str, Mapping[str, bool]] = {
    "inter-token": {"inter_beam": False, "balance": False, "prefetch": False},
    "prefetch": {"inter_beam": False},
    "inter-beam": {},
}
_ABLATION = {
    f"locality/{layout}:{part}": _Row(layout, ScheduleSettings(schedule="locality", **off))
    for layout in Layout
    for part, off in _PARTS.items()
}
_ALL = "in-gpu,layerwise,locality"
_MEANINGS = (
    "Schedules, separated by commas: in-gpu (all KV on the device), layerwise (streams layers for "
    "every token), locality (group by group). NAME/dense keeps a copy of shared KV per beam, as in "
    "the LBS paper, where layerwise/dense is the baseline and locality/dense the method. NAME/tree "
    "keeps shared KV once. NAME means both."
)


@with_settings(only=_OPTIONS, recipe=False, under=("schedule",))
def simulate(
    invocation: Invocation,
    prompt: int | None = option(None, "Length of the prompt.", "TOKENS", min=1),
    generate: int | None = option(None, "Tokens that each path generates.", "TOKENS", min=1),
    gpu: str | None = GPU,
    step_spread: float | None = option(
        None,
        "Spread of lognormal step lengths with --step-tokens as their mean (0: equal steps).",
        "SIGMA",
        min=0,
    ),
    survival: Literal["random", "score"] | None = option(
        None, "Which paths survive: random ones, or children of paths with good scores."
    ),
    tree: Path | None = option(
        None, "Replay a tree written by solve --record-tree.", "FILE", "--recorded-tree"
    ),
    schedules: str = option(_ALL, _MEANINGS, "NAMES"),
    victims: Literal["tree", "lru", "cost"] = option(
        "tree",
        "Which KV is evicted first: by need in the tree, as in vLLM, or by the cost to restore it.",
    ),
    ablation: bool = option(
        False,
        "Also simulate locality with its parts added one by one: inter-token alone, with "
        "prefetch and balance, with inter-beam (everything).",
        flag="--ablation",
    ),
    engines: str | None = ENGINES_OPTION,
) -> None:
    """Simulate a search under several schedules, and on serving engines. Loads no model.

    --model and --verifier also accept a known name such as qwen2.5-1.5b. Without --split the memory
    of each model is fixed; without --speculation there is none.
    """
    if gpu == LIST:
        print_profiles(as_json=invocation.as_json)
        return
    rows = _chosen(schedules, invocation.settings.schedule)
    named = named_engines(engines)
    linked = ablation or any(row.settings.schedule != "in-gpu" for row in rows.values())
    linked = linked or _any_host_tier(named or ())
    if "link_bandwidth" in invocation.given and not linked:
        raise InputError(f"--link-bandwidth: has no effect with --schedules {schedules}")
    speculation = _speculation(invocation, rows, ablation=ablation)
    own = {
        "prompt": prompt,
        "generate": generate,
        "step_spread": step_spread,
        "survival": survival,
    }
    with quiet_stdout():
        machine = _machine(invocation, gpu)
        case = find_case(invocation, own, tree)
        compared = _Compared(
            rows,
            ablation,
            named,
            all_schedules=schedules == _ALL,
            speculation=speculation,
            victims=victims,
        )
        report = _report(invocation, machine, case, compared)
    if invocation.as_json:
        print_json(report)
    else:
        Console().print(comparison_view(report, machine))


def _any_host_tier(engines: Sequence[str]) -> bool:
    from beamwright_lab.simulator.engines import ENGINES

    return any(ENGINES[name].host_tier for name in engines)


def _speculation(
    invocation: Invocation, rows: Mapping[str, _Row], *, ablation: bool
) -> Speculation:
    """Return --speculation; by default off, so that only schedules are compared."""
    if "speculation" not in invocation.given:
        if "verify_ahead" in invocation.given:
            raise InputError("--verify-ahead: has no effect without --speculation")
        return "off"
    given = invocation.settings.schedule.speculation
    if given == "truncate":
        raise InputError("--speculation truncate: it would change the tree, which is fixed here")
    by_rows = any(not streams_layers(row.settings) for row in rows.values())
    if given != "off" and not (by_rows or ablation):
        raise InputError(f"--speculation {given}: the schedule layerwise does not support it")
    return given


def _chosen(names: str, given: ScheduleSettings) -> dict[str, _Row]:
    """Return the rows that `--schedules` names. given: the options of all schedules."""
    known = {
        f"{name}/{layout}": _Row(layout, ScheduleSettings(schedule=name))
        for name in filter("auto".__ne__, SCHEDULES)
        for layout in Layout
    }
    chosen: dict[str, _Row] = {}
    for name in (each.strip() for each in names.split(",")):
        found = {key: row for key, row in known.items() if name in (key, key.split("/")[0])}
        if not found:
            listed = dict.fromkeys([*(key.partition("/")[0] for key in known), *known])
            hint = f"{did_you_mean(name, listed)}Known: {', '.join(listed)}"
            raise InputError(f"--schedules {name}: no such schedule. {hint}")
        chosen |= found
    rows = {row.settings.schedule: schedule_entry(row.settings) for row in chosen.values()}
    own = dict(zip(rows, declared_values(SCHEDULES, [*rows.values()], given), strict=True))
    settled = {name: ScheduleSettings(schedule=name, **own[name]) for name in rows}
    for settings in settled.values():
        make_schedule(settings)  # raise for a bad value before simulating anything
    return {
        key: replace(row, settings=settled[row.settings.schedule]) for key, row in chosen.items()
    }


def _machine(invocation: Invocation, gpu: str | None) -> Machine:
    machine = find_machine(gpu)
    bandwidth = invocation.settings.schedule.link_bandwidth
    return replace(machine, profile=with_link_bandwidth(machine.profile, bandwidth))


# --- the report ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compared:
    """What to simulate and compare. engines: those named by --engines; None if it is not given."""

    rows: Mapping[str, _Row]
    ablation: bool
    engines: tuple[str, ...] | None
    all_schedules: bool
    speculation: Speculation
    victims: Literal["tree", "lru", "cost"]


def _report(
    invocation: Invocation,
    machine: Machine,
    case: Case,
    compared: _Compared,
) -> dict[str, Any]:
    settings = invocation.settings
    models = read_models(settings, machine)
    generator, verifier = models.generator, models.verifier
    if generator.costs.state_bytes:
        compared = _with_states(compared, settings)
    if case.longest > generator.sizes.shape.context:
        raise InputError(
            f"--prompt, --generate, --tree: paths of {case.longest} tokens exceed the context of "
            f"{generator.name}, {generator.sizes.shape.context} tokens"
        )
    _, plan = split_memory(settings, models)
    names = ("max_batch", "batching", "verify_ahead", "write_back")
    # Memory does not move unless --split asks for it, so that rows differ only by their schedule.
    split = settings.memory.split if "split" in invocation.given else None
    moves = split if verifier is not None and isinstance(split, str) else None
    filled = {name: getattr(settings.schedule, name) for name in names}

    def run(chosen: Mapping[str, _Row], bar: SimulationBar) -> dict[str, Any]:
        return {
            name: _simulate(
                case,
                models,
                plan,
                row.layout,
                row.settings.model_copy(update=filled),
                moves,
                compared.speculation,
                compared.victims,
                bar.begin(name),
            )
            for name, row in chosen.items()
        }

    beside, left_out = engines_beside(
        case,
        compared.engines,
        all_schedules=compared.all_schedules,
        has_verifier=verifier is not None,
    )
    count = len(compared.rows) + compared.ablation * len(_ABLATION) + len(beside)
    with simulation_bar(count, sum(node.tokens for node in case.tree.nodes)) as bar:
        results = run(compared.rows, bar)
        parts = run(_ABLATION, bar) if compared.ablation else None
        engines = {
            name: _simulate_on_engine(name, case, models, plan, bar.begin(name)) for name in beside
        }
    readings = [each for found in engines.values() if found for each in found.values()]
    for each in [*results.values(), *(parts or {}).values(), *readings]:
        if each is not None:
            each |= {
                f"speedup_over_layerwise_{layout}": _speedup(each, results.get(baseline))
                for layout, baseline in _BASELINES.items()
            }
    sparse = _simulate_sparse(settings.sparse, case, models, plan, results)
    return {
        "model": generator.name,
        "verifier": None if verifier is None else verifier.name,
        "gpu": machine.profile.name,
        "gpu_source": machine.source,
        **case.facts,
        "link_bandwidth": settings.schedule.link_bandwidth,
        "batching": settings.schedule.batching,
        "speculation": compared.speculation,
        "verify_ahead": settings.schedule.verify_ahead,
        "write_back": settings.schedule.write_back,
        "victims": compared.victims,
        "max_batch": settings.schedule.max_batch,
        "schedule_options": dict(settings.schedule.model_extra or {}),
        "kv_bytes_per_token": generator.costs.kv_bytes_per_token,
        "state_bytes": generator.costs.state_bytes,
        "split": split,
        "kv_budget_bytes": plan.generator_kv_bytes,
        "verifier_kv_budget_bytes": None if verifier is None else plan.verifier_kv_bytes,
        "schedules": results,
        "sparse": sparse,
        "ablation": parts,
        "engines": engines or None,
        "engines_left_out": left_out,
    }


def _with_states(compared: _Compared, settings: Settings) -> _Compared:
    """Keep the rows that support recurrent layers.

    Raises:
        InputError: if none of them does, or if an option asks for something else that does not.
    """
    if compared.ablation or compared.engines or settings.sparse != SparseSettings():
        raise InputError(
            f"--ablation, --engines, --sparse: not supported for {settings.model.model}, which has "
            "recurrent layers"
        )
    rows = {
        name: row
        for name, row in compared.rows.items()
        if row.layout is Layout.TREE and not streams_layers(row.settings)
    }
    if not rows:
        raise InputError(
            f"--schedules: {', '.join(compared.rows)} do not support the recurrent layers of "
            f"{settings.model.model}"
        )
    return replace(compared, rows=rows, engines=())


def _simulate(
    case: Case,
    models: EstimateModels,
    plan: MemoryPlan,
    layout: Layout,
    schedule: ScheduleSettings,
    split: str | None,
    speculation: Speculation,
    victims: Literal["tree", "lru", "cost"],
    progress: Progress,
) -> dict[str, Any] | None:
    """Simulate the search under one schedule; return None if it does not fit."""
    from beamwright_lab.simulator.bench import Simulation
    from beamwright_lab.simulator.costs import RooflineCosts
    from beamwright_lab.simulator.run import simulate_if_fits
    from beamwright_lab.simulator.verifier import VerifierCase

    generator, scorer = models.generator, None
    if models.verifier is not None:
        model = models.verifier.costs
        costs = RooflineCosts.of(model, models.profile, layout)
        scorer = VerifierCase(model, costs, plan.verifier_kv_bytes)
    result = simulate_if_fits(
        Simulation(
            case.tree,
            generator.costs,
            RooflineCosts.of(generator.costs, models.profile, layout),
            kv_budget_bytes=plan.generator_kv_bytes,
            schedule=schedule,
            step=case.step,
            context=generator.sizes.shape.context,
            verifier=scorer,
            split=split,
            hardware=models.profile,
            speculation=speculation,
            victims=victims,
            foresees=case.foresees,
        ),
        progress,
    )
    return None if result is None else asdict(result)


def _simulate_sparse(
    asked: SparseSettings,
    case: Case,
    models: EstimateModels,
    plan: MemoryPlan,
    others: Mapping[str, Mapping[str, Any] | None],
) -> dict[str, Any] | None:
    """Simulate sparse decoding with KV on the host; None without --sparse.

    `times` in the result is its speedup over the fastest of the other schedules.
    """
    if asked == SparseSettings():
        return None  # without torch
    from beamwright.sparse.method import sparse_rule
    from beamwright_lab.simulator.sparse import SparseCase, simulate_sparse

    rule = sparse_rule(asked)
    if rule is None:
        return None

    generator = models.generator
    found = simulate_sparse(
        case.tree,
        Roofline(generator.costs, models.profile),
        SparseCase(rule, generator.sizes.shape),
        plan.generator_kv_bytes,
    )
    named = {"method": rule.method, "select": rule.select, "first": rule.first}
    if found is None:
        return {**named, "decode_s": None}
    full = [each["time_s"] - each["verify_s"] for each in others.values() if each is not None]
    return {**named, **asdict(found), "times": min(full) / found.decode_s if full else None}


def _simulate_on_engine(
    name: str, case: Case, models: EstimateModels, plan: MemoryPlan, progress: Progress
) -> dict[str, Any] | None:
    """Simulate the search on an engine, reading KV per row and once; None if it does not fit."""
    from beamwright_lab.simulator.engines import EngineCase, simulate_engine

    costs, kv_bytes = models.generator.costs, plan.generator_kv_bytes
    try:
        by_row, once = simulate_engine(
            EngineCase(case.tree, costs, models.profile, kv_bytes), name, progress
        )
    except CapacityError:
        return None
    return {"by_row": asdict(by_row), "once": asdict(once)}


def _speedup(each: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> float | None:
    return None if baseline is None else baseline["time_s"] / each["time_s"]
