"""What a run is held against, goal by goal; `unmeasured` where the run has no such figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from beamwright_lab.gpu.points import done_s, with_speedups
from beamwright_lab.paper.cases import OURS

UNMEASURED = "unmeasured"
_BEAMS, _STEP = 64, 32


def goal_rows(data: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """goal, wanted and measured, from the stages' data. Points: OPT-6.7B and its like, n = 64."""
    points = [
        row
        for name, each in data.items()
        if name.startswith("figures") and name != "figures-12gb"
        for row in with_speedups(each.get("points", []))
        if (row["n"], row["step"]) == (_BEAMS, _STEP) and row.get("round_s")
    ]
    tree = [row for row in points if _side(row) == ("tree", OURS)]
    dense = [row for row in points if _side(row) == ("dense", OURS)]
    roofline, simulator = data.get("roofline", {}), data.get("simulator", {})
    own = {
        row["direction"]: row["efficiency"] for row in data.get("link", {}).get("own_transfers", [])
    }
    compared = simulator.get("num_compared")
    ahead = [row for row in data.get("speculation", {}).get("rows", []) if "error" not in row]
    rows = [
        ("KV transfers to the device, of the link's peak", ">= 0.80", own.get("h2d")),
        ("KV transfers to the host, of the link's peak", ">= 0.80", own.get("d2h")),
        ("decode step of a 1.5B shape, of the bandwidth ceiling (least)", ">= 0.80",
         _least(row.get("share_of_ceiling") for row in roofline.get("steps", [])
                if row["graphs"] == "auto" and "0.5b" not in row["model"])),
        ("host's share of a step, 7B shape, batch 16", "< 0.05",
         roofline.get("host", {}).get("host_gap_share_unprofiled")),
        ("speedup over layer-wise, copies, n = 64", ">= 9.72", _each(dense, "speedup")),
        ("speedup over layer-wise, shared KV, n = 64", ">= 40", _each(tree, "speedup")),
        ("speedup of scheduling alone: both with shared KV, n = 64", "> 1",
         _each(tree, "speedup_shared")),
        ("I/O share, shared KV, n = 64", "< 0.05", _each(tree, "io_share")),
        ("time, shared KV over the link / in-GPU, n = 64", "<= 1.15", _over_in_gpu(points, tree)),
        ("time, speculation auto / off (most)", "<= 1.02",
         max((row["auto_over_off"] for row in ahead), default=None)),
        ("trees equal with speculation, --deterministic", "all", _equal_trees(ahead)),
        ("simulator within 20 % of the measured time", "all",
         f"{simulator['within_20_percent']} of {compared}" if compared else None),
    ]  # fmt: skip
    return [
        {"goal": goal, "wanted": wanted, "measured": UNMEASURED if found is None else found}
        for goal, wanted, found in rows
    ]


def _equal_trees(rows: Sequence[Mapping[str, Any]]) -> str | None:
    fixed = [row for row in rows if row["deterministic"]]
    equal = sum(row["exact_equal"] + row["auto_equal"] for row in fixed)
    return f"{equal} of {sum(2 * row['problems'] for row in fixed)}" if fixed else None


def _side(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["layout"], row["variant"]


def _least(values: Any) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _each(rows: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """One value per search, with the regime that it belongs to."""
    found = [f"{row[key]} ({_search(row)})" for row in rows if row.get(key) is not None]
    return ", ".join(found) or None


def _search(row: Mapping[str, Any]) -> str:
    cut = "" if row.get("whole") else f", cut at {row.get('tokens')}"
    return f"{row['model'].partition(',')[0]}, {row['regime']}{cut}"


def _over_in_gpu(
    points: Sequence[Mapping[str, Any]], tree: Sequence[Mapping[str, Any]]
) -> str | None:
    found = []
    for row in tree:
        for whole in points:
            same = (whole["model"], whole["regime"]) == (row["model"], row["regime"])
            if same and _side(whole) == ("tree", "in-gpu"):
                rounds = min(len(whole["round_s"]), len(row["round_s"]))
                ratio = done_s(row, rounds) / done_s(whole, rounds)
                found.append(f"{ratio:.3f} ({_search(row)})")
    return ", ".join(found) or None
