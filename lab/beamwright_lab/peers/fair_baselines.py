"""Locality against the strongest fair baselines, simulated: whole searches on named cards.

The LBS paper compares with layer-wise offloading, token by token, of a copy per beam. An engine
with a prefix cache that gets each step as a prompt of its own shares KV and runs what fits while
the rest waits: vLLM and SGLang, with and without a host tier, reading KV row by row as they do or
shared parts once. All of them replay one tree per case. No verifier, as in the paper.

Cells that are in the result file already are kept, unless --again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from beamwright.errors import CapacityError
from beamwright.models.named_shapes import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright.plan.workload import Workload, tree_steps
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import RecordedTree
from beamwright_lab.common import RESULTS, finish, say, table, write_json
from beamwright_lab.simulator import (
    ENGINES,
    FAIR,
    EngineCase,
    RooflineCosts,
    Simulation,
    SyntheticSearch,
    grow,
    simulate_engine,
    simulate_if_fits,
)

GIB = 2**30
PROMPT_TOKENS, GENERATE_TOKENS, WIDTH = 128, 1920, 2
HOST_BANDWIDTH = 41e9  # dual-channel DDR4-3200, 80 % of 51.2 GB/s: the LBS paper's host
_HALF = 2
_NAME = "fair_baselines"
_READINGS = ("by row", "once")
_OURS: Mapping[str, tuple[Layout, Mapping[str, Any]]] = {
    "layer-wise, copies": (Layout.DENSE, {"schedule": "layerwise"}),
    "layer-wise, shared": (Layout.TREE, {"schedule": "layerwise"}),
    "LBS as published": (
        Layout.DENSE,
        {
            "schedule": "locality",
            "planner": "greedy",
            "reuse": False,
            "batching": "grouped",
            "write_back": "eager",
        },
    ),
    "locality, shared": (Layout.TREE, {"schedule": "locality"}),
    "locality, continuous": (Layout.TREE, {"schedule": "locality", "batching": "continuous"}),
    "all resident": (Layout.TREE, {"schedule": "in-gpu"}),
}


@dataclass(frozen=True)
class Setting:
    """A model on a card. kv_gib: for KV."""

    model: str
    gpu: str
    kv_gib: float


SETTINGS = {
    "MHA": Setting("opt-6.7b", "rtx-4090", 7.0),  # the paper's
    "GQA": Setting("qwen2.5-7b", "rtx-4060-ti-16gb", 1.25),  # what its weights leave there
}


@dataclass(frozen=True)
class Case:
    """One search."""

    setting: str
    num_beams: int
    step_tokens: int

    @property
    def name(self) -> str:
        return f"{self.setting} n={self.num_beams} step={self.step_tokens}"

    def engine_case(self) -> EngineCase:
        setting = SETTINGS[self.setting]
        shape = shape_from_text(setting.model)
        model, hardware = ModelCosts.of(shape, _HALF), find_profile(setting.gpu)
        budget = int(setting.kv_gib * GIB)
        return EngineCase(_tree(self.num_beams, self.step_tokens), model, hardware, budget)


@lru_cache(maxsize=2)
def _tree(num_beams: int, step_tokens: int) -> RecordedTree:
    return grow(SyntheticSearch(num_beams, WIDTH, PROMPT_TOKENS, GENERATE_TOKENS, step_tokens))


# --- cells -----------------------------------------------------------------------------------


def ours(case: Case, name: str) -> dict[str, Any] | None:
    """One of our own schedules; None if it does not fit."""
    layout, options = _OURS[name]
    found = case.engine_case()
    step = StepSettings(
        step_tokens=case.step_tokens, max_step_tokens=case.step_tokens, max_tokens=GENERATE_TOKENS
    )
    result = simulate_if_fits(
        Simulation(
            found.tree,
            found.model,
            RooflineCosts.of(found.model, found.hardware, layout),
            _all_bytes(found) if name == "all resident" else found.kv_budget_bytes,
            ScheduleSettings(**options),
            step,
        )
    )
    return result and _rounded(asdict(result))


def _all_bytes(case: EngineCase) -> int:
    """Device memory for every step that is ever decoded, partial blocks included."""
    tokens = case.tree.prompt_tokens + sum(node.tokens + 16 for node in case.tree.nodes)
    return tokens * case.model.kv_bytes_per_token


def engine(case: Case, name: str) -> list[dict[str, Any]] | None:
    """One engine with both readings; None if it does not fit."""
    try:
        return [_rounded(asdict(each)) for each in simulate_engine(case.engine_case(), name)]
    except CapacityError:
        return None


def _rounded(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in result.items()}


def cells(case: Case) -> dict[str, Callable[[], Any]]:
    """What is computed for a case, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for name in _OURS:
        found[name] = lambda name=name: ours(case, name)  # type: ignore[misc]
    for name in ENGINES:
        found[name] = lambda name=name: engine(case, name)  # type: ignore[misc]
    return found


def computed(cases: Iterable[Case], kept: Mapping[str, Any], part: str) -> dict[str, Any]:
    """All cells, kept ones included; written after each, so that a stopped run goes on."""
    results = {name: dict(each) for name, each in kept.items()}
    for case in cases:
        row = results.setdefault(case.name, {"kv_budget_bytes": case.engine_case().kv_budget_bytes})
        for name, compute in cells(case).items():
            if name not in row:
                say(f"  {case.name}: {name}")
                row[name] = compute()
                write_json(part, results)
    return results


def host_attention_s(case: Case, layout: Layout) -> float:
    """Attention over what the device does not hold computed where it is, FlexGen's option.

    An estimate: expected unions, one pass over the KV at the host's bandwidth, in turn with the
    device, whose layers need its result. DENSE: a copy per beam; TREE: shared parts read once.
    """
    found = case.engine_case()
    roofline = Roofline(found.model, found.hardware)
    token_bytes = found.model.kv_bytes_per_token
    work = Workload(case.num_beams, WIDTH, PROMPT_TOKENS, GENERATE_TOKENS, case.step_tokens)
    total_s = 0.0
    for step in tree_steps(work):
        for token in range(1, step.num_tokens + 1):
            seen = case.num_beams * (step.path_tokens + token)
            held = seen if layout is Layout.DENSE else step.union_tokens + case.num_beams * token
            near = min(held, found.kv_budget_bytes // token_bytes)
            total_s += roofline.decode_step(case.num_beams, near, seen)
            total_s += (held - near) * token_bytes / HOST_BANDWIDTH
    return total_s


# --- the table -------------------------------------------------------------------------------


def strongest(row: Mapping[str, Any], engines: Iterable[str], reading: int) -> tuple[str, Any]:
    """The fastest of these engines with one way to read KV."""
    fitting = [(name, row[name][reading]) for name in engines if row[name] is not None]
    return min(fitting, key=lambda each: each[1]["time_s"])


def table_row(case: Case, row: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of locality, and every baseline's over it."""
    mine, paper, layerwise = (
        row["locality, shared"],
        row["layer-wise, copies"],
        row["layer-wise, shared"],
    )

    def over(other: Mapping[str, Any] | None) -> str | None:
        return None if other is None else f"{other['time_s'] / mine['time_s']:.2f}"

    found: dict[str, Any] = {
        "case": case.name,
        "KV GiB": round(row["kv_budget_bytes"] / GIB, 2),
        "locality s": f"{mine['time_s']:,.1f}",
        "in / out GiB": _moved(mine),
        "layer-wise, copies": over(paper) or "no fit",
        "layer-wise, shared": over(layerwise) or "no fit",
    }
    for kind, engines in (("recompute", FAIR[::2]), ("offload", FAIR[1::2])):
        for reading, how in enumerate(_READINGS):
            name, best = strongest(row, engines, reading)
            short = "S" if name.startswith("sglang") else "V"
            work = f"{best['recomputed_tokens']:,} tok" if kind == "recompute" else _moved(best)
            found[f"{kind}, {how}"] = f"{over(best)} {short} ({work})"
    _, by_row = strongest(row, FAIR, 0)
    name, once = strongest(row, FAIR, 1)
    if layerwise is not None and layerwise["time_s"] < once["time_s"]:
        name, once = "layer-wise, shared", layerwise
    found["engines as they read"] = over(by_row)
    found["strongest fair"] = f"{over(once)} ({name})"
    found["Belady"] = over(row["clairvoyant"][1])
    found["all resident"] = over(row["all resident"])
    found["CPU attention"] = f"{host_attention_s(case, Layout.TREE) / mine['time_s']:.2f}"
    return found


def _moved(result: Mapping[str, Any]) -> str:
    return f"{result['h2d_bytes'] / GIB:,.0f} / {result['d2h_bytes'] / GIB:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--beams", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--steps", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--again", action="store_true", help="compute everything anew")
    args = parser.parse_args()
    cases = [Case(s, n, t) for s in args.settings for n in args.beams for t in args.steps]
    part = f"{_NAME}_cells_{'_'.join(args.settings)}"
    kept: dict[str, Any] = {}
    if not args.again:
        for file in sorted(RESULTS.glob(f"{_NAME}_cells_*.json")):
            kept.update(json.loads(file.read_text()))
    results = computed(cases, kept, part)
    rows = [table_row(case, results[case.name]) for case in cases]
    say(table(rows, list(rows[0])))
    settings = {name: asdict(each) for name, each in SETTINGS.items()}
    finish(_NAME, {"settings": settings, "table": rows, "cells": results})


if __name__ == "__main__":
    main()
