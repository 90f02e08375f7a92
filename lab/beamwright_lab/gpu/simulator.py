"""Stage `simulator`: predict every measured search with the simulator, and compare.

Each point of the figure stages is replayed from its recorded tree, under the same schedule and KV
budget, on the hardware profile that stage `link` measured in the same run. Needs no GPU.
"""

from __future__ import annotations

import base64
import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beamwright.models.named import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import HardwareProfile, with_cuda_graphs
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import SearchTree
from beamwright.tree.recording import record_tree
from beamwright_lab.baselines.layerwise.declare import streams_layers
from beamwright_lab.gpu.context import Context, one_line
from beamwright_lab.lbs.cases import VARIANTS
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import HOST_ROW_S, RooflineCosts
from beamwright_lab.simulator.recorded import RecordedTree, read_recorded
from beamwright_lab.simulator.run import simulate

FIGURES = ("figures-opt-6.7b", "figures-llama-2-7b", "figures-qwen1.5-7b", "figures-12gb")
LINK = "link"


def run(context: Context) -> dict[str, Any]:
    """Compare all points measured so far; return one row per point."""
    measured = context.data_of(LINK)
    if measured is None or "profile" not in measured:
        raise RuntimeError("no hardware profile to predict from: run stage `link` first")
    profile = HardwareProfile(**measured["profile"])
    data: dict[str, Any] = {"profile": measured["profile"], "points": [], "not_run": []}
    for stage in FIGURES:
        for point in (context.data_of(stage) or {}).get("points", []):
            if "recorded" not in point:
                continue
            if context.left_s < 1:
                data["not_run"].append(point["name"])
                continue
            data["points"].append({"stage": stage, **compare_point(point, profile)})
            context.save(data)
    ratios = [row["time_ratio"] for row in data["points"] if "time_ratio" in row]
    data["within_20_percent"] = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    data["num_compared"] = len(ratios)
    return data


def compare_point(point: Mapping[str, Any], profile: HardwareProfile) -> dict[str, Any]:
    """Simulate one point; return measured and simulated seconds, I/O share and bytes.

    Measured seconds are decoding plus stalls.
    """
    measured_s = point["decode_s"] + point["stall_s"]
    row: dict[str, Any] = {"name": point["name"], "measured_s": round(measured_s, 4)}
    try:
        found = simulate(_simulation(point, profile))
    except Exception as error:  # a truncated tree may not replay: lose one row only
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
    """Build the simulation of a measured point.

    Passes cost as much as replayed CUDA graphs, except that layer-wise streaming launches each
    operator.
    """
    shape = shape_from_text(point["model"])
    model = ModelCosts.of(shape, point["element_bytes"])
    step, schedule = point["step"], ScheduleSettings(**VARIANTS[point["variant"]].options)
    card = (profile, 0.0) if streams_layers(schedule) else (with_cuda_graphs(profile), HOST_ROW_S)
    return Simulation(
        tree=unpack_tree(point["recorded"]),
        model=model,
        costs=RooflineCosts.of(model, card[0], Layout(point["layout"]), card[1]),
        kv_budget_bytes=point["device_budget_bytes"],
        schedule=schedule,
        step=StepSettings(step_tokens=step, max_step_tokens=step, max_tokens=point["generate"]),
        context=shape.context,
    )


def pack_tree(tree: SearchTree) -> str:
    """Compress a tree to base64 text: a result file holds thousands of nodes."""
    return base64.b64encode(zlib.compress(json.dumps(record_tree(tree)).encode())).decode()


def unpack_tree(packed: str) -> RecordedTree:
    """Restore a tree from the text of `pack_tree`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tree.json"
        file.write_bytes(zlib.decompress(base64.b64decode(packed)))
        return read_recorded(file)
