"""The simulator beside a card: a stage, and predictions for a named card (`--predict`).

The stage replays every measured point on the profile of the same run: the very tree that the device
grew, under the same schedule and budget, so bytes can be compared as well. The predictions are
whole searches of the figures: what the first real run is to be held against. Needs no GPU.
"""

from __future__ import annotations

import base64
import json
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.models.shape import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.solver.memory import ModelBytes
from beamwright.tree import RecordedTree, SearchTree
from beamwright.tree.recorded import read_recorded, record_tree
from beamwright_lab.common import say
from beamwright_lab.gpu.context import Context, one_line
from beamwright_lab.gpu.points import (
    PAPER_SPEEDUP,
    SEVEN_B,
    WIDTH,
    Point,
    family_points,
    first_points,
    small_card_points,
)
from beamwright_lab.paper.cases import BASELINE, GIB, LBS, VARIANTS, SimulatedCase
from beamwright_lab.paper.cases import simulate as simulate_point
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.run import SimulationResult, simulate

FIGURES = ("figures-opt-6.7b", "figures-llama-2-7b", "figures-qwen1.5-7b", "figures-12gb")
LINK = "link"
COLUMNS = (
    "model", "n", "step", "layout", "schedule", "KV GiB", "time s", "I/O share", "to device GiB",
    "to host GiB", "groups", "speedup", "speedup, shared", "paper",
)  # fmt: skip


def run(context: Context) -> dict[str, Any]:
    """See the module."""
    measured = context.data_of(LINK)
    if measured is None or "profile" not in measured:
        raise RuntimeError("the stage `link` has measured no profile to predict from")
    profile = HardwareProfile(**measured["profile"])
    data: dict[str, Any] = {"profile": measured["profile"], "points": [], "not_run": []}
    for stage in FIGURES:
        for point in (context.data_of(stage) or {}).get("points", []):
            if "recorded" not in point:
                continue
            if context.left_s < 1:
                data["not_run"].append(point["name"])
                continue
            data["points"].append({"stage": stage, **compared(point, profile)})
            context.save(data)
    ratios = [row["time_ratio"] for row in data["points"] if "time_ratio" in row]
    data["within_20_percent"] = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    data["num_compared"] = len(ratios)
    return data


def compared(point: Mapping[str, Any], profile: HardwareProfile) -> dict[str, Any]:
    """Measured and predicted seconds and bytes. The measured side is decoding and stalls."""
    measured_s = point["decode_s"] + point["stall_s"]
    row: dict[str, Any] = {"name": point["name"], "measured_s": round(measured_s, 4)}
    try:
        found = simulate(_simulation(point, profile))
    except Exception as error:  # a cut-off tree that cannot be replayed costs one row
        return {**row, "error": one_line(error)}
    return {
        **row,
        "simulated_s": round(found.time_s, 4),
        "time_ratio": round(found.time_s / measured_s, 4) if measured_s else None,
        "measured_io_share": point["io_share"],
        "simulated_io_share": round(found.io_share, 4),
        "measured_h2d_bytes": point["h2d_bytes"],
        "simulated_h2d_bytes": found.h2d_bytes,
        "groups_equal": found.groups == point["groups"],
    }


def _simulation(point: Mapping[str, Any], profile: HardwareProfile) -> Simulation:
    shape = shape_from_text(point["model"])
    model = ModelCosts.of(shape, point["element_bytes"])
    step = point["step"]
    options = {**VARIANTS[point["variant"]].options}
    return Simulation(
        tree=unpack_tree(point["recorded"]),
        model=model,
        costs=RooflineCosts.of(model, profile, Layout(point["layout"])),
        kv_budget_bytes=point["device_budget_bytes"],
        schedule=ScheduleSettings(**options),
        step=StepSettings(step_tokens=step, max_step_tokens=step, max_tokens=point["generate"]),
        context=shape.context,
    )


def pack_tree(tree: SearchTree) -> str:
    """A recorded tree as short text: thousands of nodes stand in a result file."""
    return base64.b64encode(zlib.compress(json.dumps(record_tree(tree)).encode())).decode()


def unpack_tree(packed: str) -> RecordedTree:
    """The tree of `pack_tree`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tree.json"
        file.write_bytes(zlib.decompress(base64.b64decode(packed)))
        return read_recorded(file)


# --- a named card ----------------------------------------------------------------------------


def points(*, quick: bool) -> list[Point]:
    """Whole searches of the paper's lengths; each once."""
    if quick:
        return [p for p in first_points() if p.regime == "paper" and (p.n, p.step) == (64, 128)]
    found = [*first_points(), *(p for m in SEVEN_B[1:] for p in family_points(m))]
    whole = [point for point in found if point.regime == "paper"]
    return list(dict.fromkeys([*whole, *small_card_points()]))


def predictions(gpu: str, memory_bytes: int, chosen: Sequence[Point]) -> list[dict[str, Any]]:
    """One row per point; `None` where it does not fit.

    Raises:
        InputError: for a card of unknown name, or one with less memory than that.
    """
    profile = find_profile(gpu)
    if memory_bytes > profile.device_memory_bytes:
        raise InputError(f"--memory {memory_bytes:,}: {gpu} has {profile.device_memory_bytes:,}")
    baselines = {(p.search, p.layout): p for p in chosen if p.variant == BASELINE}
    rows = []
    for point in chosen:
        kv_bytes = _kv_bytes(point, memory_bytes)
        row = {
            "model": point.model,
            "n": point.n,
            "step": point.step,
            "layout": str(point.layout),
            "schedule": point.variant,
            "memory_bytes": point.memory_bytes or memory_bytes,
            "KV GiB": round(kv_bytes / GIB, 2),
            "paper": PAPER_SPEEDUP[point.model] if _is_the_papers(point) else None,
        }
        both = [baselines.get((point.search, layout)) for layout in (Layout.DENSE, Layout.TREE)]
        rows.append({**row, **_predicted(point, gpu, kv_bytes, both)})
        say(f"  {point.name}: {rows[-1]['time s']} s")
    return rows


def _is_the_papers(point: Point) -> bool:
    return (str(point.layout), point.variant) == ("dense", LBS)


def _kv_bytes(point: Point, memory_bytes: int) -> int:
    """What the point asks for, within what weights and activations leave of the memory."""
    sizes = ModelBytes(shape_from_text(point.model), 2)
    left = (point.memory_bytes or memory_bytes) - sizes.weights - sizes.activations(point.n)
    if left <= 0:
        raise InputError(f"--memory {memory_bytes:,}: the weights of {point.model} do not fit")
    if point.memory_bytes is not None:
        return left // 2  # as `--memory` does: the other half is for copies of the present group
    return min(point.kv_bytes or left, left)


def _predicted(
    point: Point, gpu: str, kv_bytes: int, baselines: Sequence[Point | None]
) -> dict[str, Any]:
    """baselines: layer-wise with a copy per beam, and with shared KV."""
    found = simulate_point(_case(point, gpu, kv_bytes), point.variant, point.layout)
    if found is None:
        return {"time s": "does not fit"}
    speedups = [_speedup(found, each, gpu, kv_bytes) for each in baselines]
    return {
        "time s": round(found.time_s, 1),
        "I/O share": round(found.io_share, 3),
        "to device GiB": round(found.h2d_bytes / GIB, 1),
        "to host GiB": round(found.d2h_bytes / GIB, 1),
        "groups": found.groups,
        "speedup": speedups[0],
        "speedup, shared": speedups[1],
    }


def _speedup(
    found: SimulationResult, baseline: Point | None, gpu: str, kv_bytes: int
) -> float | None:
    if baseline is None:
        return None
    before = simulate_point(_case(baseline, gpu, kv_bytes), baseline.variant, baseline.layout)
    return round(before.time_s / found.time_s, 2) if before else None


def _case(point: Point, gpu: str, kv_bytes: int) -> SimulatedCase:
    return SimulatedCase(
        model=point.model,
        gpu=gpu,
        num_beams=point.n,
        step_tokens=point.step,
        kv_bytes=None if point.variant == "in-gpu" else kv_bytes,
        width=WIDTH,
    )
