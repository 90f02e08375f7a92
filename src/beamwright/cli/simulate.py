"""`beamwright simulate`: one search under several schedules, on hardware that nobody needs to have.

The real scheduling code runs on a virtual clock; the tree is recorded from a real search, or made
up. Generator only: verification takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from beamwright.cli import engine
from beamwright.cli.options import Invocation, with_settings
from beamwright.cli.output import print_json, quiet_stdout
from beamwright.cli.plan import _ELEMENT_BYTES, _kv_budget_bytes
from beamwright.cli.simulate_view import comparison_table
from beamwright.config import ScheduleSettings, StepSettings
from beamwright.cost import Layout, ModelCosts
from beamwright.errors import InputError
from beamwright.hardware import DEFAULT_PROFILE, HardwareProfile, find_profile
from beamwright.report.recorded import RecordedTree, read_recorded
from beamwright.search import strategy_row

_DEFAULT_STEP_TOKENS = 32
_BASELINE = "layerwise"
_OPTIONS = (
    "model", "dtype", "context", "n", "width", "search", "seed", "step_tokens", "memory",
    "kv_memory", "link_bandwidth",
)  # fmt: skip
_SYNTHETIC = ("n", "width", "search", "seed")


@dataclass(frozen=True)
class _Row:
    """A schedule by name: how it is set up, which layout attention reads, and what it means."""

    layout: Layout
    settings: ScheduleSettings
    meaning: str


def _locality(layout: Layout, meaning: str, **parts: bool) -> _Row:
    return _Row(layout, ScheduleSettings(schedule="locality", **parts), meaning)


_SCHEDULES = {
    "in-gpu": _Row(Layout.TREE, ScheduleSettings(schedule="in-gpu"), "all KV on the device"),
    _BASELINE: _Row(
        Layout.DENSE,
        ScheduleSettings(schedule="layerwise"),
        "layers streamed for every token, a copy per beam (the LBS paper's baseline)",
    ),
    "layerwise-shared": _Row(
        Layout.TREE, ScheduleSettings(schedule="layerwise"), "the same with shared KV"
    ),
    "locality-dense": _locality(
        Layout.DENSE, "group by group, a copy per beam on the device (the paper's method)"
    ),
    "locality": _locality(Layout.TREE, "group by group, shared KV"),
}
_PARTS = {
    "inter-token": {"inter_beam": False, "balance": False, "prefetch": False},
    "prefetch": {"inter_beam": False},
    "inter-beam": {},
}
_ABLATION = {
    f"{name}:{part}": _locality(_SCHEDULES[name].layout, part, **off)
    for name in ("locality-dense", "locality")
    for part, off in _PARTS.items()
}
_ALL = ",".join(_SCHEDULES)
_MEANINGS = "; ".join(f"{name}: {row.meaning}" for name, row in _SCHEDULES.items())

_PromptOption = Annotated[
    int | None, typer.Option("--prompt", metavar="TOKENS", min=1, help="Length of the prompt.")
]
_GenerateOption = Annotated[
    int | None,
    typer.Option("--generate", metavar="TOKENS", min=1, help="Tokens of each path after it."),
]
_GpuOption = Annotated[
    str,
    typer.Option("--gpu", metavar="NAME", help="Hardware profile; measured is this machine's."),
]
_SpreadOption = Annotated[
    float | None,
    typer.Option(
        "--step-spread",
        metavar="SIGMA",
        min=0,
        help="Lognormal step lengths with --step-tokens as their mean (0: all steps alike).",
    ),
]
_SurvivalOption = Annotated[
    Literal["random", "score"] | None,
    typer.Option("--survival", help="Who survives: anyone, or families with good scores."),
]
_TreeOption = Annotated[
    Path | None,
    typer.Option("--recorded-tree", metavar="FILE", help="Replay what solve --record-tree wrote."),
]
_SchedulesOption = Annotated[
    str, typer.Option("--schedules", metavar="NAMES", help=f"With commas between. {_MEANINGS}.")
]
_AblationOption = Annotated[
    bool,
    typer.Option(
        "--ablation",
        help="Locality with parts switched on one after another: inter-token alone; "
        "prefetch and balance; inter-beam (everything).",
    ),
]


@with_settings(only=_OPTIONS, recipe=False)
def simulate(
    invocation: Invocation,
    prompt: _PromptOption = None,
    generate: _GenerateOption = None,
    gpu: _GpuOption = DEFAULT_PROFILE,
    step_spread: _SpreadOption = None,
    survival: _SurvivalOption = None,
    tree: _TreeOption = None,
    schedules: _SchedulesOption = _ALL,
    ablation: _AblationOption = False,
) -> None:
    """Simulate a search under several schedules. Loads no model.

    --model takes the name of a shape as well, such as opt-6.7b.
    """
    rows = _chosen(schedules)
    own = {
        "prompt": prompt,
        "generate": generate,
        "step_spread": step_spread,
        "survival": survival,
    }
    with quiet_stdout():
        machine = _machine(invocation, gpu)
        case = _synthetic(invocation, own) if tree is None else _recorded(invocation, own, tree)
        report = _report(invocation, machine, case, rows, ablation)
    if invocation.as_json:
        print_json(report)
    else:
        Console().print(comparison_table(report))


def _chosen(names: str) -> dict[str, _Row]:
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in _SCHEDULES:
            known = ", ".join(_SCHEDULES)
            raise InputError(f"--schedules {name}: no such schedule; known: {known}")
    return {name: _SCHEDULES[name] for name in chosen}


def _machine(invocation: Invocation, gpu: str) -> HardwareProfile:
    profile = find_profile(gpu)
    bandwidth = invocation.settings.schedule.link_bandwidth
    if bandwidth is None:
        return profile
    return replace(profile, h2d_bandwidth=bandwidth, d2h_bandwidth=bandwidth, link_share=1.0)


# --- what is searched ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A tree, and what is said of it. longest: tokens of its longest path."""

    tree: Any
    facts: Mapping[str, Any]
    longest: int
    step: StepSettings


def _synthetic(invocation: Invocation, own: Mapping[str, Any]) -> _Case:
    settings, search = invocation.settings, invocation.settings.search
    row = strategy_row(search)
    if not row.by_level or row.step_limits is not None:
        raise InputError(
            f"--search {row.name}: the rounds of a made-up tree are its levels, all with "
            "steps of one kind; replay a recorded tree, or choose another search"
        )
    prompt, generate = own["prompt"] or 128, own["generate"] or 1920
    step_tokens = settings.step.step_tokens or min(_DEFAULT_STEP_TOKENS, generate)
    sigma = own["step_spread"] or 0.0
    facts = {
        "n": search.n,
        "width": search.width,
        "prompt": prompt,
        "generate": generate,
        "step_tokens": step_tokens,
        "step_spread": sigma,
        "search": row.name,
        "survival": own["survival"] or "random",
        "seed": search.seed,
        "options": dict(search.model_extra or {}),
        "tree": None,
    }
    tree = engine.grow_tree(facts)
    step = _step_settings(tree, step_tokens if sigma == 0 else None, generate)
    return _Case(tree, facts, prompt + generate, step)


def _recorded(invocation: Invocation, own: Mapping[str, Any], file: Path) -> _Case:
    given = [name for name in _SYNTHETIC if name in invocation.given]
    given += [name for name, value in own.items() if value is not None]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{option} describes a made-up search; --recorded-tree replays one")
    tree = read_recorded(file)
    if not tree.nodes:
        raise InputError(f"{file}: the recorded search has no steps")
    longest = _longest_path(tree)
    rounds = [node.round for node in tree.nodes]
    step_tokens = invocation.settings.step.step_tokens
    facts = {
        "n": max(rounds.count(number) for number in set(rounds)),
        "width": None,
        "prompt": tree.prompt_tokens,
        "generate": longest - tree.prompt_tokens,
        "step_tokens": step_tokens,
        "step_spread": None,
        "search": None,
        "survival": None,
        "seed": None,
        "options": None,
        "tree": str(file),
    }
    return _Case(tree, facts, longest, _step_settings(tree, step_tokens, None))


def _step_settings(tree: Any, step_tokens: int | None, max_tokens: int | None) -> StepSettings:
    """What a schedule may know of the steps' lengths."""
    most = max(node.tokens for node in tree.nodes)
    if step_tokens is not None and most > step_tokens:
        raise InputError(f"--step-tokens {step_tokens}: the tree has a step of {most} tokens")
    return StepSettings(step_tokens=step_tokens, max_step_tokens=most, max_tokens=max_tokens)


def _longest_path(tree: RecordedTree) -> int:
    ends: dict[tuple[int, ...], int] = {(): tree.prompt_tokens}
    for node in tree.nodes:
        ends[node.lineage] = ends[node.lineage[:-1]] + node.tokens
    return max(ends.values())


# --- the report ------------------------------------------------------------------------------


def _report(
    invocation: Invocation,
    profile: HardwareProfile,
    case: _Case,
    rows: Mapping[str, _Row],
    ablation: bool,
) -> dict[str, Any]:
    settings = invocation.settings
    element_bytes = _ELEMENT_BYTES.get(settings.model.dtype, profile.element_bytes)
    shape = engine.find_shape(settings.model)
    if case.longest > shape.context:
        raise InputError(
            f"paths of {case.longest} tokens exceed the context of {settings.model.model}, "
            f"{shape.context} tokens"
        )
    model = ModelCosts.of(shape, element_bytes)
    activations = engine.activation_bytes(shape, element_bytes, settings.search.n)
    budget = _kv_budget_bytes(settings, profile, model, activations)

    def run(chosen: Mapping[str, _Row]) -> dict[str, Any]:
        return {
            name: engine.simulate_search(
                case.tree,
                model,
                profile,
                row.layout,
                kv_budget_bytes=budget,
                schedule=row.settings,
                step=case.step,
                context=shape.context,
            )
            for name, row in chosen.items()
        }

    results = run(rows)
    parts = run(_ABLATION) if ablation else None
    baseline = results.get(_BASELINE)
    for each in [*results.values(), *(parts or {}).values()]:
        if each is not None:
            each["speedup_over_layerwise"] = baseline and baseline["time_s"] / each["time_s"]
    return {
        "model": settings.model.model,
        "gpu": profile.name,
        **case.facts,
        "link_bandwidth": settings.schedule.link_bandwidth,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_budget_bytes": budget,
        "schedules": results,
        "ablation": parts,
    }
