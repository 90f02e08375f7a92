"""HTML report that compares evaluations: charts, a table of methods, links to tree pages.

The report is made from the folders of `eval --out`. All text of a user is escaped. The page has no
script and loads nothing from elsewhere; its links lead to tree pages beside it. Runs that differ
only in n are one method, and one line of a chart. matplotlib is the extra `plot`.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader

from beamwright.errors import InputError, UnavailableError
from beamwright.evaluate.metrics import Record, summarise
from beamwright.evaluate.run import parse_records
from beamwright.io import import_optional, read_file, read_json_object, write_atomically
from beamwright.search.choose import CHOICES
from beamwright.sections import MOST_CANDIDATES
from beamwright.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHES = ("-", "--", ":")  # styles for the first, second and third ten lines
_SPREAD = 1.025  # horizontal factor that separates intervals at the same n
_LABEL = 0.16  # height of a legend line in inches

# Charts: name, title, label of the x axis, the per-problem figure on that axis (None: n), its unit.
_AXES: tuple[tuple[str, str, str, str | None, float], ...] = (
    ("n", "Accuracy against n", "candidates, n", None, 1.0),
    ("tokens", "Accuracy against tokens", "tokens generated per problem", "tokens", 1.0),
    ("seconds", "Accuracy against time", "seconds per problem", "seconds", 1.0),
    ("kv", "Accuracy against KV memory",
     "peak GiB of KV on the device, both models, all problems in flight",
     "kv_device_peak_bytes", GIB),
)  # fmt: skip

# A point of a chart: x, y and the interval of y.
Point = tuple[float, float, Sequence[float]]


@dataclass(frozen=True)
class EvaluatedRun:
    """One run, read from an `--out` folder. summary: the metrics of its records (`summarise`)."""

    name: str
    folder: Path
    dataset: str
    settings: Mapping[str, Any]
    records: Sequence[Record]
    summary: Mapping[str, Any]

    @property
    def n(self) -> int:
        """The number of candidates per round."""
        return int(self.settings["search"]["n"])


_Method = tuple[str, EvaluatedRun]


# --- folders -----------------------------------------------------------------------------------


def find_runs(folder: Path) -> list[EvaluatedRun]:
    """Read the runs in a folder and its subfolders, by name. Writes nothing.

    Raises:
        InputError: if there is none with a finished problem, or a file is damaged.
    """
    runs = [_read_run(folder, results) for results in sorted(folder.rglob("results.jsonl"))]
    runs = [run for run in runs if run.records]
    if not runs:
        raise InputError(f"{folder}: holds no results of `eval --out`")
    return runs


def _read_run(above: Path, results: Path) -> EvaluatedRun:
    folder, path = results.parent, results.with_name("settings.json")
    content, identity = read_file(results), read_json_object(path, "the settings of a run")
    try:
        dataset, settings = str(identity["dataset"]), dict(identity["settings"])
        n = settings["search"]["n"]
        if type(n) is not int or not 1 <= n <= MOST_CANDIDATES:
            raise TypeError("no number of candidates")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not the settings of a run") from error
    found = parse_records(results, content)[0].values()
    records = sorted(found, key=lambda record: record.index)
    name = above.resolve().name if folder == above else str(folder.relative_to(above))
    return EvaluatedRun(name, folder, dataset, settings, records, summarise(records, n))


# --- the page ----------------------------------------------------------------------------------


def write_report(
    runs: Sequence[EvaluatedRun], path: Path, title: str, *, png: bool = False
) -> tuple[list[Path], str | None]:
    """Write the page; return the PNG files written, and the reason if there are no charts.

    png: also write a file per chart next to the page, such as `report-n.png` for `report.html`.
    Without matplotlib the page has only tables and says what to install.

    Raises:
        InputError: if a file cannot be written.
    """
    missing, charts, pngs = None, [], {}
    names, common = name_runs(runs)
    methods = sorted(zip(names, runs, strict=True), key=lambda method: (method[0], method[1].n))
    try:
        for name, caption, figure in make_charts(methods):
            svg, image = io.BytesIO(), io.BytesIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            charts.append((caption, base64.b64encode(svg.getvalue()).decode()))
            if png:
                figure.savefig(image, format="png", dpi=140)
                pngs[path.with_name(f"{path.stem}-{name}.png")] = image.getvalue()
    except UnavailableError as error:
        missing = str(error)
    loader = PackageLoader("beamwright.evaluate", "")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html").render(
        title=title,
        datasets=", ".join(dict.fromkeys(run.dataset for run in runs)),
        counts=sorted({run.summary["problems"] for run in runs}),
        common=common,
        charts=charts,
        missing=missing,
        methods=methods,
        choices=list(CHOICES),
        forms={"share": "{:.1%}".format, "number": format_number, "gib": _gib},
        trees=_trees([run for _, run in methods], path),
        marks={True: "\u2713 ", False: "\u2717 ", None: ""},
    )
    # ASCII, because a model's text may hold lone surrogates, which UTF-8 cannot encode.
    write_atomically(path, page.encode("ascii", "xmlcharrefreplace"))
    for file, image_bytes in pngs.items():
        write_atomically(file, image_bytes)
    return list(pngs), missing


def format_number(value: float) -> str:
    """Format a number with three significant digits, and k or M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and unit == "M"):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _gib(size: float) -> str:
    return format_number(size / GIB)


def _trees(runs: Sequence[EvaluatedRun], page: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the records with tree pages, and the pages' paths, by problem and run name."""
    trees: dict[tuple[int, str], dict[str, Any]] = {}
    for run in runs:
        for record in run.records:
            file = run.folder / "trees" / f"{record.index:04d}.html"
            if file.is_file():
                address = Path(os.path.relpath(file.resolve(), page.resolve().parent)).as_posix()
                row = trees.setdefault((record.index, record.problem), {})
                row[run.name] = (record, address)
    return dict(sorted(trees.items()))


# --- methods and charts ------------------------------------------------------------------------


def name_runs(runs: Sequence[EvaluatedRun]) -> tuple[list[str], dict[str, str]]:
    """Return a name for each run, and the settings that all runs share.

    A name holds the strategy and each setting except n in which the runs differ. Unset settings are
    omitted.
    """
    flat = [dict(_leaves({"dataset": run.dataset, **run.settings})) for run in runs]
    names, common = [str(settings.get("search.search")) for settings in flat], {}
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key) for settings in flat]
        option = key.rpartition(".")[2].replace("_", "-")
        if len({json.dumps(value) for value in values}) == 1:
            if values[0] is not None:
                common[option] = repr(values[0]) if "\n" in str(values[0]) else str(values[0])
        elif key not in ("search.search", "search.n"):
            for number, value in enumerate(values):
                if value is not None:
                    # A folder, such as a model's, is shown by its last component.
                    names[number] += f", {option} {str(value).rstrip('/').rpartition('/')[2]}"
    return names, common


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_charts(methods: Sequence[_Method]) -> Iterator[tuple[str, str, Figure]]:
    """Return name, title and figure of each chart that has points.

    methods: the runs by method name, then by n. A run without judged problems has no point. A
    figure of zero has no place on a logarithmic axis.

    Raises:
        UnavailableError: without matplotlib.
    """
    for name, title, x_label, figure, unit in _AXES:
        lines: dict[str, list[Point]] = {method: [] for method, _ in methods}
        for method, run in methods:
            summary, x = run.summary, float(run.n)
            if figure is not None:
                x = (summary["per_problem"].get(figure) or {"value": 0.0})["value"] / unit
            if x > 0 and summary["accuracy"] is not None:
                lines[method].append((x, summary["accuracy"], summary["accuracy_interval"]))
        if any(lines.values()):
            yield name, title, draw(lines, title, x_label, counted=figure is None)


def draw(
    lines: Mapping[str, Sequence[Point]], title: str, x_label: str, *, counted: bool = False
) -> Figure:
    """Draw one chart of lines and points with their intervals, over a logarithmic x axis.

    counted: x is a whole number that lines share, such as n.

    Raises:
        UnavailableError: without matplotlib.
    """
    import_optional(
        "matplotlib.figure", "no charts: they need matplotlib (pip install 'beamwright[plot]')"
    )
    from matplotlib import rc_context  # noqa: PLC0415 (an extra)
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(8, 4.5 + _LABEL * len(lines)), layout="constrained")
        axes = figure.add_subplot(title=title, xscale="log", xlabel=x_label, ylabel="accuracy")
        for number, (name, points) in enumerate(lines.items()):
            shift = _SPREAD ** (number - (len(lines) - 1) / 2) if counted else 1.0
            axes.errorbar(
                x=[x * shift for x, _, _ in points],
                y=[y for _, y, _ in points],
                yerr=[[max(0.0, y - low) for _, y, (low, _) in points],
                      [max(0.0, high - y) for _, y, (_, high) in points]],
                fmt=f"o{_DASHES[number // 10 % len(_DASHES)]}",
                color=f"C{number % 10}",
                capsize=3,
                markersize=4,
                label="".join(char if char.isprintable() else "?" for char in name),
            )  # fmt: skip
        places = sorted({x for points in lines.values() for x, _, _ in points})
        margin = 1.15 if len(places) > 1 else 2.0
        axes.set_xlim(places[0] / margin, places[-1] * margin)
        if counted:
            axes.set_xticks(places)
        else:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: format_number(value))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower left", fontsize=8)  # never over the lines, long as it is
    return figure
