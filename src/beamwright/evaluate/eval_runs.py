"""What a report of evaluations is made of: runs, the lines they lie on, the charts' axes.

Knows the object of `eval --json`; draws nothing. Runs that differ in n alone lie on one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.units import GIB


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
    keys = list(dict.fromkeys(key for each in flat for key in each))
    differing = [key for key in keys if len({json.dumps(each.get(key)) for each in flat}) > 1]
    hidden = {"search.search", "search.n"}
    names = []
    for each in flat:
        parts = [
            f"{key.rpartition('.')[2].replace('_', '-')} {_shown(each[key])}"
            for key in differing
            if key not in hidden and each.get(key) is not None
        ]
        names.append(", ".join([str(each["search.search"]), *parts]))
    return names


def common_settings(runs: Sequence[EvaluatedRun]) -> dict[str, str]:
    """What all runs have in common, by name; settings that are not set are left out."""
    flat = [dict(_leaves(run.settings)) for run in runs]
    return {
        key.rpartition(".")[2].replace("_", "-"): repr(value) if "\n" in str(value) else str(value)
        for key, value in flat[0].items()
        if value is not None and all(each.get(key) == value for each in flat)
    }


def make_charts(runs: Sequence[EvaluatedRun]) -> list[Chart]:
    """A chart per axis that has any point; a run without a judged problem has none."""
    names = method_names(runs)
    styles = {name: number for number, name in enumerate(dict.fromkeys(names))}
    charts = []
    for name, title, x_label, figure, unit in _AXES:
        lines = []
        for method, style in styles.items():
            own = [run for run, each in zip(runs, names, strict=True) if each == method]
            points = list(_points(sorted(own, key=lambda run: run.n), figure, unit))
            if points:
                lines.append(Line(method, style, tuple(points)))
        if lines:
            charts.append(Chart(name, title, x_label, tuple(lines), counted=figure is None))
    return charts


def make_pass_chart(runs: Sequence[EvaluatedRun]) -> Chart | None:
    """pass@k against k, a line per method at its largest n; None if no run has one."""
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
    if not lines:
        return None
    title = "pass@k: any of k random candidates right"
    return Chart("pass", title, "k of the n candidates", tuple(lines), counted=True)


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
