"""The charts of a report: runs, the lines they lie on, the axes, and their drawing by matplotlib.

Knows the object of `eval --json`. Runs that differ in n alone lie on one line. matplotlib is the
extra `plot`; all but `draw` does without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from beamwright.errors import UnavailableError
from beamwright.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    "#123f5c", "#c4432b", "#4f9a94", "#dc9a3a", "#7d5fa8", "#3b76b8", "#8a7a4a", "#a33f6f",
    "#5c8f3a",
)  # fmt: skip
_DASHES = ("-", "--", ":")  # a second and third turn through the colours
_SPREAD = 1.025  # factor between neighbours at the same x


@dataclass(frozen=True)
class TreeLink:
    """The page of one problem's tree. address: relative to the report. correct: None unjudged."""

    problem: str
    index: int
    address: str
    answer: str | None
    correct: bool | None


@dataclass(frozen=True)
class EvaluatedRun:
    """One evaluated setting. summary: of `evaluate.summarise`. settings: as JSON."""

    name: str
    dataset: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    trees: tuple[TreeLink, ...] = ()

    @property
    def n(self) -> int:
        """Candidates per round."""
        return int(self.settings["search"]["n"])


@dataclass(frozen=True)
class Point:
    """A place on a chart; low and high bound y, None where there is no interval."""

    x: float
    y: float
    low: float | None
    high: float | None
    label: str


@dataclass(frozen=True)
class Line:
    """The points of one method, by x or n. style: its number, the same in every chart."""

    name: str
    style: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """One chart of accuracies.

    name: part of its file's name. counted: x is a whole number that lines share, such as n.
    """

    name: str
    title: str
    x_label: str
    lines: tuple[Line, ...]
    counted: bool


# name, title, axis, figure per problem (None: n itself), its unit
_AXES: tuple[tuple[str, str, str, str | None, float], ...] = (
    ("n", "Accuracy against n", "candidates, n", None, 1.0),
    ("tokens", "Accuracy against tokens", "tokens generated per problem", "tokens", 1.0),
    ("seconds", "Accuracy against time", "seconds per problem", "seconds", 1.0),
    ("kv", "Accuracy against KV memory",
     "GiB of KV on the device, both models, peak of all in flight: the smaller n, the more",
     "kv_device_peak_bytes", GIB),
)  # fmt: skip


def method_names(runs: Sequence[EvaluatedRun]) -> list[str]:
    """A name per run: its strategy, and every setting but n in which the runs differ."""
    flat = [dict(_leaves({"dataset": run.dataset, **run.settings})) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    differing = [key for key in keys if len({json.dumps(run.get(key)) for run in flat}) > 1]
    hidden = {"search.search", "search.n"}
    names = []
    for settings in flat:
        parts = [
            f"{_option(key)} {_shown(settings[key])}"
            for key in differing
            if key not in hidden and settings.get(key) is not None
        ]
        names.append(", ".join([str(settings["search.search"]), *parts]))
    return names


def common_settings(runs: Sequence[EvaluatedRun]) -> dict[str, str]:
    """What all runs have in common, by name; settings that are not set are left out."""
    flat = [dict(_leaves(run.settings)) for run in runs]
    return {
        _option(key): repr(value) if "\n" in str(value) else str(value)
        for key, value in flat[0].items()
        if value is not None and all(settings.get(key) == value for settings in flat)
    }


def make_charts(runs: Sequence[EvaluatedRun]) -> list[Chart]:
    """A chart per axis that has any point, then pass@k; a run without a judged problem has none."""
    names = method_names(runs)
    styles = {name: number for number, name in enumerate(dict.fromkeys(names))}
    charts = []
    for name, title, x_label, figure, unit in _AXES:
        lines = []
        for method, style in styles.items():
            of_method = [run for run, named in zip(runs, names, strict=True) if named == method]
            points = list(_points(sorted(of_method, key=lambda run: run.n), figure, unit))
            if points:
                lines.append(Line(method, style, tuple(points)))
        if lines:
            charts.append(Chart(name, title, x_label, tuple(lines), counted=figure is None))
    return [*charts, *_pass_charts(runs)]


def _pass_charts(runs: Sequence[EvaluatedRun]) -> Iterator[Chart]:
    """pass@k against k, a line per method at its largest n."""
    largest: dict[str, EvaluatedRun] = {}
    for method, run in zip(method_names(runs), runs, strict=True):
        if method not in largest or run.n > largest[method].n:
            largest[method] = run
    lines = []
    for style, (method, run) in enumerate(largest.items()):
        points = []
        for k, estimate in run.summary["pass_at"].items():
            if estimate is not None:
                low, high = estimate["interval"]
                points.append(Point(float(k), estimate["value"], low, high, f"{run.name}, k = {k}"))
        if points:
            lines.append(Line(f"{method}, n = {run.n}", style, tuple(points)))
    if lines:
        title = "pass@k: any of k random candidates right"
        yield Chart("pass", title, "k of the n candidates", tuple(lines), counted=True)


def _points(runs: Sequence[EvaluatedRun], figure: str | None, unit: float) -> Iterator[Point]:
    for run in runs:
        summary = run.summary
        x: float | None = run.n
        if figure is not None:
            estimate = summary["per_problem"].get(figure)
            x = None if estimate is None else estimate["value"] / unit
        # The axis is logarithmic: a figure of nothing has no place on it.
        if x is not None and x > 0 and summary["accuracy"] is not None:
            low, high = summary["accuracy_interval"]
            yield Point(x, summary["accuracy"], low, high, f"{run.name}, n = {run.n}")


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    """A model's folder by its last part."""
    text = str(value)
    return text.rstrip("/").rpartition("/")[2] if "/" in text else text


def _option(key: str) -> str:
    return key.rpartition(".")[2].replace("_", "-")


def format_number(value: float) -> str:
    """Three significant digits, with k and M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and unit == "M"):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# --- drawing -----------------------------------------------------------------------------------


def draw(chart: Chart) -> Figure:
    """The chart as a figure: lines, points and their intervals; x is logarithmic.

    Raises:
        UnavailableError: without matplotlib.
    """
    try:
        from matplotlib import rc_context  # noqa: PLC0415 (an extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.ticker import LogLocator  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "no charts: they need matplotlib (pip install 'beamwright[plot]')"
        ) from error
    with rc_context({"text.parse_math": False, "svg.hashsalt": chart.name}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xscale("log")
        for number, line in enumerate(chart.lines):
            axes.errorbar(**_drawn(chart, number), label=_printable(line.name))
        places = sorted({point.x for line in chart.lines for point in line.points})
        margin = 1.15 if len(places) > 1 else 2.0
        axes.set_xlim(places[0] / margin, places[-1] * margin)
        if chart.counted:
            axes.set_xticks(places)
        else:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: format_number(value))
        axes.minorticks_off()
        axes.set_xlabel(chart.x_label)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_ylabel("pass@k" if chart.name == "pass" else "accuracy")
        axes.set_title(chart.title, fontsize=10)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8)  # beside the lines, never over them
    return figure


def _drawn(chart: Chart, number: int) -> dict[str, Any]:
    """What matplotlib's `errorbar` takes for one line; intervals at one x stand side by side."""
    line = chart.lines[number]
    shift = _SPREAD ** (number - (len(chart.lines) - 1) / 2) if chart.counted else 1.0
    turn, place = divmod(line.style, len(COLOURS))
    return {
        "x": [point.x * shift for point in line.points],
        "y": [point.y for point in line.points],
        "yerr": [
            [0.0 if p.low is None else max(0.0, p.y - p.low) for p in line.points],
            [0.0 if p.high is None else max(0.0, p.high - p.y) for p in line.points],
        ],
        "fmt": f"o{_DASHES[turn % len(_DASHES)]}",
        "color": COLOURS[place],
        "ecolor": f"{COLOURS[place]}66",
        "capsize": 3,
        "markersize": 4,
    }


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
