"""The frontier: seconds, bytes and recomputed tokens against the KV that a device has, simulated.

One search per shape (MHA, GQA), n and kind of steps, with 100 to 5 % of the KV that it takes where
it all fits. Beside this engine with its defaults: the same without barriers; vLLM's and SGLang's
rules, with and without a host tier, reading shared KV once as it does here ("by row" is how they
read); "Belady", SGLang's order with evictions by one who knows the tree; and the clairvoyant bound
on bytes (`cost.clairvoyant`), which holds for who computes nothing again. No verifier, which those
rules do not know. STEP stops its lowest-scored path where memory ends: its seconds are for the
share of the tree that is left, and it is not among the rivals.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from beamwright.errors import CapacityError
from beamwright.models.shape import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import RecordedTree
from beamwright.tree.recorded import read_recorded
from beamwright_lab.common import RESULTS, finish, say, table, write_json
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.engines import FAIR, EngineCase, EngineResult, simulate_engine
from beamwright_lab.simulator.run import SimulationResult, simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow

GIB = 2**30
PROMPT_TOKENS = 128
LEAST_TOKENS, LEAST_ROUNDS = 320, 4
PERCENT = (100, 75, 50, 25, 15, 10, 5)
SHAPES = {"MHA": "opt-6.7b", "GQA": "llama-3.1-8b"}
OURS, CONTINUOUS, BELADY, STEP = "Beamwright", "continuous", "Belady", "STEP"
HEADINGS = {
    "vllm": "vLLM",
    "vllm-offload": "vLLM, offload",
    "sglang": "SGLang",
    "sglang-hicache": "SGLang, HiCache",
    "sglang-write-back": "the same, write-back",
}
_ENGINES = {**{name: name for name in FAIR}, BELADY: "clairvoyant", STEP: "step"}
_AMPLE_BYTES = 2**42
_WEIGHT_BYTES = 2

Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Search:
    """A search on a card. steps: what its steps are called; step: what a schedule knows of them."""

    shape: str
    n: int
    steps: str
    gpu: str
    tree: RecordedTree
    step: StepSettings

    @property
    def name(self) -> str:
        return f"{self.shape}, n = {self.n}, {self.steps}"

    @property
    def model(self) -> ModelCosts:
        return ModelCosts.of(shape_from_text(SHAPES[self.shape]), _WEIGHT_BYTES)

    def simulate(self, kv_bytes: int, options: Mapping[str, Any]) -> SimulationResult:
        """The search here."""
        costs = RooflineCosts.of(self.model, find_profile(self.gpu), Layout.TREE)
        schedule = ScheduleSettings.model_validate(options)
        return simulate(Simulation(self.tree, self.model, costs, kv_bytes, schedule, self.step))


def searches(args: argparse.Namespace) -> Iterator[Search]:
    """What the options ask for."""

    def tree_of(n: int, step: int, sigma: float) -> RecordedTree:
        tokens = args.generate or max(LEAST_TOKENS, LEAST_ROUNDS * step)
        return grow(SyntheticSearch(n, args.width, PROMPT_TOKENS, tokens, step, step_sigma=sigma))

    trees: dict[tuple[int, str], tuple[RecordedTree, int | None]] = {}
    for n, step in product(args.n, args.steps):
        trees[n, f"{step}"] = tree_of(n, step, 0.0), step
        trees[n, f"about {step}"] = tree_of(n, step, args.spread), None
    if args.recorded_tree is not None:
        trees[args.n[-1], "recorded"] = read_recorded(args.recorded_tree), None
    for shape in args.shapes:
        for (n, steps), (tree, exactly) in trees.items():
            most = max(node.tokens for node in tree.nodes)
            limits = StepSettings(
                step_tokens=exactly, max_step_tokens=most, max_tokens=_longest(tree)
            )
            yield Search(shape, n, steps, args.gpu, tree, limits)


def _longest(tree: RecordedTree) -> int:
    """Tokens of the longest path behind the prompt."""
    ends: dict[tuple[int, ...], int] = {(): 0}
    for node in tree.nodes:
        ends[node.lineage] = ends[node.lineage[:-1]] + node.tokens
    return max(ends.values())


# --- rows: one system with one budget ---------------------------------------------------------


def rows_of(search: Search, args: argparse.Namespace) -> Iterator[Row]:
    """All systems with all budgets."""
    resident = search.simulate(_AMPLE_BYTES, {"schedule": "in-gpu"})
    peak = resident.device_peak_bytes
    options = {"schedule": "locality", **dict(each.split("=", 1) for each in args.set)}
    for percent in args.percent:
        budget = peak * percent // 100
        facts = {
            "search": search.name,
            "percent": percent,
            "kv_bytes": budget,
            "all_fits_s": resident.time_s,
        }
        ours = _if_it_fits(partial(search.simulate, budget, options))
        facts |= {} if ours is None else _bounds(search, ours)
        yield {**facts, "system": OURS, **_compared(ours, facts)}
        free = _if_it_fits(partial(search.simulate, budget, {**options, "batching": "continuous"}))
        yield {**facts, "system": CONTINUOUS, **_compared(free, facts)}
        case = EngineCase(search.tree, search.model, find_profile(search.gpu), budget)
        for system, rules in _ENGINES.items():
            by_row, once = _if_it_fits(partial(simulate_engine, case, rules)) or (None, None)
            found = _compared(once, facts)
            if by_row is not None and once is not None:
                found |= {"by_row_s": by_row.time_s, "completed": once.completed}
            yield {**facts, "system": system, **found}


def _if_it_fits(run: Callable[[], T]) -> T | None:
    try:
        return run()
    except CapacityError:
        return None


def _bounds(search: Search, ours: SimulationResult) -> dict[str, Any]:
    """Of the tree and the budget alone; and the link's seconds for the loads."""
    card = find_profile(search.gpu)
    return {
        "load_bound_bytes": ours.load_bound_bytes,
        "store_bound_bytes": ours.store_bound_bytes,
        "blind_store_bound_bytes": ours.blind_store_bound_bytes,
        "link_floor_s": ours.load_bound_bytes / (card.h2d_bandwidth * card.link_share),
    }


def _compared(
    found: SimulationResult | EngineResult | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """What is kept of a result; nothing of what does not fit."""
    if found is None:
        return {}
    kept = ("time_s", "stall_s", "io_share", "h2d_bytes", "d2h_bytes", "recomputed_tokens")
    bound = facts.get("load_bound_bytes")
    return {
        **{name: getattr(found, name) for name in kept},
        "over_all_fits": found.time_s / facts["all_fits_s"],
        "over_load_bound": found.h2d_bytes / bound if bound else None,
    }


# --- the table: one line per search and budget -------------------------------------------------


def lines_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of one search and budget side by side."""
    return [_line(each) for each in _side_by_side(rows)]


def _side_by_side(rows: Sequence[Row]) -> Iterable[Mapping[str, Row]]:
    """By system, for each search and budget."""
    together: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        together.setdefault((row["search"], row["percent"]), {})[row["system"]] = row
    return together.values()


def _line(systems: Mapping[str, Row]) -> dict[str, Any]:
    ours = systems[OURS]
    fits = "time_s" in ours
    return {
        "search": ours["search"],
        "KV %": ours["percent"],
        "KV GiB": f"{ours['kv_bytes'] / GIB:.2f}",
        "all fits, s": f"{ours['all_fits_s']:.1f}",
        f"{OURS}, s": f"{ours['time_s']:.1f}" if fits else "no fit",
        "over all fits": f"{ours['over_all_fits']:.2f}" if fits else None,
        "waits": f"{ours['io_share']:.2f}" if fits else None,
        "in / bound, GiB": _against(ours, "h2d_bytes", "load_bound_bytes") if fits else None,
        "out / bound, GiB": _against(ours, "d2h_bytes", "blind_store_bound_bytes")
        if fits
        else None,
        "over the bound": _ratio(ours.get("over_load_bound")),
        "recomputed": ours.get("recomputed_tokens"),
        CONTINUOUS: _cell(systems[CONTINUOUS]),
        **{heading: _cell(systems[name]) for name, heading in HEADINGS.items()},
        BELADY: _cell(systems[BELADY]),
        STEP: _cell(systems[STEP]),
        "best rival": _best(systems, "time_s"),
        "as it reads": _best(systems, "by_row_s"),
    }


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _against(row: Row, moved: str, bound: str) -> str:
    return f"{row[moved] / GIB:.1f} / {row[bound] / GIB:.1f}"


def _cell(row: Row) -> str:
    """Seconds; share of the tree, if it is not whole; GiB in and out, of a system with a host tier;
    thousands of tokens recomputed."""
    if "time_s" not in row:
        return "no fit"
    moved = "" if row.get("completed", 1) == 1 else f"{row['completed']:.0%} of the tree; "
    if row["h2d_bytes"] or row["d2h_bytes"]:
        moved += f"{row['h2d_bytes'] / GIB:.1f} / {row['d2h_bytes'] / GIB:.1f}; "
    return f"{row['time_s']:.1f} ({moved}{row['recomputed_tokens'] / 1000:.0f}k)"


def _best(systems: Mapping[str, Row], seconds: str) -> str | None:
    """The fastest engine's seconds over ours."""
    found = _fastest(systems, seconds)
    return None if found is None else f"{found[0]:.2f} {HEADINGS[found[1]]}"


def _fastest(systems: Mapping[str, Row], seconds: str) -> tuple[float, str] | None:
    """The fastest engine's seconds over ours, and its name."""
    times = {name: systems[name][seconds] for name in FAIR if seconds in systems[name]}
    if not times or "time_s" not in systems[OURS]:
        return None
    name = min(times, key=times.__getitem__)
    return times[name] / systems[OURS]["time_s"], name


def quoted(rows: Sequence[Row]) -> dict[str, Any]:
    """Each search and budget that fits, beside the fastest engine, reading shared KV once and by
    row; and by share of the KV the least and the most of its GiB and of those two."""
    shares: dict[str, Any] = {}
    lines = []
    for systems in _side_by_side(rows):
        once, by_row = (_fastest(systems, each) for each in ("time_s", "by_row_s"))
        if once is None or by_row is None:
            continue
        ours = systems[OURS]
        values = {"gib": ours["kv_bytes"] / GIB, "once": once[0], "by_row": by_row[0]}
        lines.append(
            {
                "search": ours["search"],
                "percent": ours["percent"],
                "ours_s": round(ours["time_s"], 2),
                **{name: round(value, 4) for name, value in values.items()},
                "engine": HEADINGS[once[1]],
            }
        )
        share = shares.setdefault(f"{ours['percent']} %", {"searches": 0})
        share["searches"] += 1
        for name, value in values.items():
            least, most = share.get(name, (value, value))
            share[name] = [round(min(least, value), 4), round(max(most, value), 4)]
    return {"shares": shares, "lines": lines}


# --- the figure --------------------------------------------------------------------------------


def draw(rows: Sequence[Row], file: Path) -> bool:
    """A panel per search as SVG: seconds over a card where all fits; False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = list(dict.fromkeys(row["search"] for row in rows))
    num_shapes = len({name.partition(",")[0] for name in names})
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "frontier"}):
        figure = Figure(figsize=(3.6 * len(names) / num_shapes, 3.2 * num_shapes))
        figure.set_layout_engine("constrained")
        panels = figure.subplots(num_shapes, len(names) // num_shapes, squeeze=False, sharey=True)
        for axes, name in zip(panels.flat, names, strict=True):
            _panel(axes, name, [row for row in rows if row["search"] == name and "time_s" in row])
        figure.supxlabel("% of the KV that the search takes", fontsize=9)
        figure.supylabel("seconds, over a card where all fits", fontsize=9)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _panel(axes: Any, name: str, rows: Sequence[Row]) -> None:
    for number, system in enumerate((OURS, CONTINUOUS, *HEADINGS, BELADY)):
        own = [row for row in rows if row["system"] == system]
        axes.plot(
            [row["percent"] for row in own],
            [row["over_all_fits"] for row in own],
            marker="o",
            markersize=3,
            linewidth=2 if system == OURS else 1,
            linestyle={BELADY: "--", CONTINUOUS: ":"}.get(system, "-"),
            color=f"C{number}",
            label=HEADINGS.get(system, system),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(PERCENT, [str(each) for each in PERCENT], fontsize=7)
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"], fontsize=7)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.set_title(name, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="+", default=[32, 256], help="tokens of a step")
    parser.add_argument("--generate", type=int, help="tokens of a path; 320, or four steps")
    parser.add_argument("--spread", type=float, default=0.6, help="of lognormal step lengths")
    parser.add_argument("--recorded-tree", type=Path, help="of solve --record-tree; another panel")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--percent", nargs="+", type=int, default=list(PERCENT))
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="schedule")
    args = parser.parse_args()
    rows: list[Row] = []
    for search in searches(args):
        for row in rows_of(search, args):
            rows.append(row)
            say(f"  {row['search']}, {row['percent']} %, {row['system']}: {_cell(row)}")
        write_json("frontier", {"rows": rows})  # a run that is stopped leaves these
    figure = RESULTS / "frontier.svg"
    say(f"written: {figure}" if draw(rows, figure) else "no figure: it needs matplotlib")
    lines = lines_of(rows)
    print(table(lines, list(lines[0])))
    settings = {**vars(args), "recorded_tree": str(args.recorded_tree or ""), "shapes": SHAPES}
    finish("frontier", {"settings": settings, "rows": rows, "quoted": quoted(rows)})


if __name__ == "__main__":
    main()
