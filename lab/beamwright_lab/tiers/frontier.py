"""Simulate seconds against KV memory (the frontier), beside vLLM, SGLang and a lower bound.

One search per shape (MHA, GQA), n and kind of steps (`searches`), with shares of the KV that it
needs to keep all of it on the device. Compared are this engine's ways to batch; vLLM's and SGLang's
scheduling rules, with and without a host tier; the floor (`studies.floor`); and levers (options
that both sides may have), each alone. Engines read shared KV once, as here, and again "by row", as
they really do. The acceptance of drafts is an input. There is no verifier: the engines' rules know
none.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar, get_args

from beamwright.errors import CapacityError
from beamwright.plan.machines import CAPTURED_LAUNCH_S
from beamwright.sections import ScheduleSettings
from beamwright_lab import tables
from beamwright_lab.common import RESULTS, finish, say, write_json
from beamwright_lab.simulator.engines import FAIR, EngineResult
from beamwright_lab.simulator.run import SimulationResult
from beamwright_lab.studies.floor import floor_s
from beamwright_lab.tiers.searches import (
    LEVERS,
    OWN_DRAFTS,
    RIVALS_DRAFTS,
    SHAPES,
    Search,
    searches,
)

GIB = 2**30
PERCENT = (100, 50, 25, 10)
OURS = "Beamwright"
# Ways to batch; auto, the default, chooses from the others.
BATCHINGS = tuple(get_args(ScheduleSettings.model_fields["batching"].annotation))
HEADINGS = {
    "vllm": "vLLM",
    "vllm-offload": "vLLM, offload",
    "sglang": "SGLang",
    "sglang-hicache": "SGLang, HiCache",
    "sglang-write-back": "the same, write-back",
}
# Engines that were the fastest in some case; only these get levers.
_STRONGEST = ("vllm-offload", "sglang", "sglang-hicache")
_AMPLE_BYTES = 2**42

Row = Mapping[str, Any]
T = TypeVar("T")


# --- rows: one system with one budget and one lever -------------------------------------------


def rows_of(search: Search, args: argparse.Namespace, known: Sequence[Row] = ()) -> list[Row]:
    """Simulate a search with all systems, budgets and levers; return a row each.

    known: engines' rows of this search, which are not simulated again.
    """
    kept = {(row["kv_bytes"], row["lever"], row["system"]): row for row in known}
    options = {"schedule": "locality", **dict(each.split("=", 1) for each in args.set)}
    plain = LEVERS[""]
    resident = search.simulate(_AMPLE_BYTES, {"schedule": "in-gpu"}, plain)
    rows: list[Row] = []
    for percent in args.percent:
        budget = resident.device_peak_bytes * percent // 100
        facts = {
            "search": search.name,
            "percent": percent,
            "kv_bytes": budget,
            "all_fits_s": resident.time_s,
            "floor_s": floor_s(search.tree, search.roofline(plain), budget),
        }
        for batching in BATCHINGS:
            chosen = {**options, "batching": batching}
            found = _if_it_fits(partial(search.simulate, budget, chosen, plain))
            system = OURS if batching == "auto" else batching
            rows.append({**facts, "lever": "", "system": system, **_our_fields(search, found)})
        for name, lever in LEVERS.items():
            if name:
                found = _if_it_fits(partial(search.simulate, budget, options, lever))
                rows.append({**facts, "lever": name, "system": OURS, **_our_fields(search, found)})
            for engine in FAIR if not name else _STRONGEST:
                found_there = kept.get((budget, name, engine))
                if found_there is None:
                    readings = _if_it_fits(partial(search.on_engine, budget, engine, lever))
                    found_there = {"lever": name, "system": engine, **_engine_fields(readings)}
                rows.append({**found_there, **facts})
    return rows


def _if_it_fits(run: Callable[[], T]) -> T | None:
    try:
        return run()
    except CapacityError:
        return None


def _our_fields(search: Search, found: SimulationResult | None) -> dict[str, Any]:
    """Return fields of our result, with lower bounds for this tree and budget; or nothing."""
    if found is None:
        return {}
    card = search.roofline(LEVERS[""]).hardware
    return {
        **_result_fields(found),
        "load_bound_bytes": found.load_bound_bytes,
        "store_bound_bytes": found.store_bound_bytes,
        "link_floor_s": found.load_bound_bytes / (card.h2d_bandwidth * card.link_share),
    }


def _engine_fields(readings: tuple[EngineResult, EngineResult] | None) -> dict[str, Any]:
    if readings is None:
        return {}
    by_row, once = readings
    return {**_result_fields(once), "by_row_s": by_row.time_s, "passes": once.iterations}


def _result_fields(found: SimulationResult | EngineResult) -> dict[str, Any]:
    names = ("time_s", "stall_s", "h2d_bytes", "d2h_bytes", "recomputed_tokens")
    return {name: getattr(found, name) for name in names}


# --- lines: one search and budget -------------------------------------------------------------


def lines_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Summarise each search and budget that fits: our seconds, the floor, the fastest engine."""
    cells: dict[tuple[str, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if "time_s" in row:
            known = cells.setdefault((row["search"], row["percent"]), {})
            known[row["lever"], row["system"]] = row
    return [_line(cell) for cell in cells.values() if ("", OURS) in cell]


def _line(cell: Mapping[tuple[str, str], Row]) -> dict[str, Any]:
    ours = cell["", OURS]
    return {
        "search": ours["search"],
        "percent": ours["percent"],
        "gib": round(ours["kv_bytes"] / GIB, 3),
        "all_fits_s": round(ours["all_fits_s"], 2),
        "floor_s": round(ours["floor_s"], 2),
        "link_floor_s": round(ours["link_floor_s"], 2),
        "over_floor": round(ours["time_s"] / ours["floor_s"], 4),
        **_compare_engines(cell, ""),
        "batching": {
            name: round(cell["", name]["time_s"], 2) for name in BATCHINGS if ("", name) in cell
        },
        "levers": {name: _compare_engines(cell, name) for name in LEVERS if name},
    }


def _compare_engines(cell: Mapping[tuple[str, str], Row], lever: str) -> dict[str, Any]:
    """Our seconds, and the fastest engine's over ours: reading shared KV once, and by row."""
    ours = cell[lever, OURS]["time_s"]
    found: dict[str, Any] = {"ours_s": round(ours, 2)}
    for reading, seconds in (("once", "time_s"), ("by_row", "by_row_s")):
        times = {name: cell[lever, name][seconds] for name in FAIR if (lever, name) in cell}
        if times:
            best = min(times, key=times.__getitem__)
            found |= {
                f"{reading}_s": round(times[best], 2),
                reading: round(times[best] / ours, 4),
                f"{reading}_engine": HEADINGS[best],
            }
    return found


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the lines, and least, geometric mean and most for each share of the KV."""
    lines = lines_of(rows)
    shares = {}
    for percent in dict.fromkeys(line["percent"] for line in lines):
        own = [line for line in lines if line["percent"] == percent]
        share: dict[str, Any] = {"searches": len(own)}
        for name in ("gib", "once", "by_row", "over_floor"):
            share[name] = _span([line[name] for line in own if name in line])
        share["batching"] = {
            name: _span([line["batching"][name] / line["ours_s"] for line in own])
            for name in own[0]["batching"]
        }
        share["levers"] = {lever: _lever(own, lever) for lever in own[0]["levers"]}
        shares[f"{percent} %"] = share
    return {"shares": shares, "lines": lines}


def _lever(lines: Sequence[Mapping[str, Any]], lever: str) -> dict[str, Any]:
    """Our gain from a lever, and the fastest engine's seconds over ours, both with the lever.

    as_they_are: only ours has it.
    """
    own = [line["levers"][lever] for line in lines]
    pairs = list(zip(lines, own, strict=True))
    return {
        "gain": _span([line["ours_s"] / each["ours_s"] for line, each in pairs]),
        "once": _span([each["once"] for each in own]),
        "by_row": _span([each["by_row"] for each in own]),
        "as_they_are": _span([line["once_s"] / each["ours_s"] for line, each in pairs]),
        "as_they_are_by_row": _span([line["by_row_s"] / each["ours_s"] for line, each in pairs]),
    }


def _span(values: Sequence[float]) -> dict[str, float]:
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return {"least": round(min(values), 4), "mean": round(mean, 4), "most": round(max(values), 4)}


# --- the figure -------------------------------------------------------------------------------


def draw(rows: Sequence[Row], file: Path) -> bool:
    """Plot seconds over those with all KV on the device, as SVG; False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = list(dict.fromkeys(row["search"] for row in rows))
    num_shapes = len({name.partition(",")[0] for name in names})
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "frontier"}):
        figure = Figure(figsize=(3.2 * len(names) / num_shapes, 3.2 * num_shapes))
        figure.set_layout_engine("constrained")
        panels = figure.subplots(num_shapes, len(names) // num_shapes, squeeze=False, sharey=True)
        for axes, name in zip(panels.flat, names, strict=True):
            own = [row for row in rows if row["search"] == name and not row["lever"]]
            _panel(axes, name, [row for row in own if "time_s" in row])
        figure.supxlabel("% of the KV that the search takes", fontsize=9)
        figure.supylabel("seconds, over a card where all fits", fontsize=9)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _panel(axes: Any, name: str, rows: Sequence[Row]) -> None:
    for number, system in enumerate((OURS, "floor", *HEADINGS)):
        own = [row for row in rows if row["system"] == (OURS if system == "floor" else system)]
        seconds = "floor_s" if system == "floor" else "time_s"
        axes.plot(
            [row["percent"] for row in own],
            [row[seconds] / row["all_fits_s"] for row in own],
            marker="o",
            markersize=3,
            linewidth=2 if system == OURS else 1,
            linestyle="--" if system == "floor" else "-",
            color=f"C{number}",
            label=HEADINGS.get(system, system),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(PERCENT, [str(each) for each in PERCENT], fontsize=7)
    axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"], fontsize=7)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.set_title(name, fontsize=9)


def _engines_of(file: Path | None) -> dict[str, list[Row]]:
    """Read the engines' rows of an earlier result, by search."""
    found: dict[str, list[Row]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if file is not None else ():
        if row["system"] in FAIR:
            found.setdefault(row["search"], []).append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="*", default=[32, 128, 256], help="step lengths")
    parser.add_argument("--about", type=int, nargs="*", default=[128], help="lognormal means")
    parser.add_argument("--spread", type=float, default=0.6, help="sigma of lognormal steps")
    parser.add_argument("--generate", type=int, help="tokens of a path; default 320, or four steps")
    parser.add_argument("--no-recorded", dest="recorded", action="store_false")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--percent", nargs="+", type=int, default=list(PERCENT))
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="schedule")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--engines-from",
        type=Path,
        metavar="FILE",
        help="reuse the engines' rows of an earlier result with the same settings",
    )
    args = parser.parse_args()
    rows, known = list[Row](), _engines_of(args.engines_from)
    chosen = list(searches(args))
    with ProcessPoolExecutor(args.processes) as pool:
        each_known = (known.get(search.name, ()) for search in chosen)
        for found in pool.map(rows_of, chosen, repeat(args), each_known):
            rows += found
            say(f"  {found[0]['search']}: {len(found)} rows")
            write_json("frontier", {"rows": rows})  # kept if the run is stopped
    figure = RESULTS / "frontier.svg"
    say(f"written: {figure}" if draw(rows, figure) else "no figure: matplotlib is not installed")
    inputs = {"drafts": vars(OWN_DRAFTS), "rivals_drafts": vars(RIVALS_DRAFTS)}
    settings = {
        **vars(args),
        "engines_from": str(args.engines_from or ""),
        "shapes": SHAPES,
        "captured_launch_s": CAPTURED_LAUNCH_S,
        **inputs,
    }
    quoted = {**summarise(rows), **inputs}
    for shown in (tables.frontier, tables.frontier_shares, tables.frontier_batching):
        print(shown(quoted), end="\n\n")
    finish("frontier", {"settings": settings, "rows": rows, "quoted": quoted})


if __name__ == "__main__":
    main()
