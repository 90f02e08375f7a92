"""One self-contained page that compares evaluations: charts, a table of methods, links to trees.

Knows `EvaluatedRun` only; text of a user reaches the page escaped. The page holds no script and
loads nothing from anywhere; its links lead to tree pages beside it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment

from beamwright.errors import UnavailableError
from beamwright.evaluate.charts import (
    EvaluatedRun,
    TreeLink,
    common_settings,
    draw,
    format_number,
    make_charts,
    method_names,
)
from beamwright.io import write_whole
from beamwright.units import GIB

_DPI = 140
_COLUMNS = (
    "method", "n", "problems", "accuracy", "best", "majority", "weighted", "pass@1", "pass@n",
    "tokens", "seconds", "p50, s", "p95, s", "goodput, tok/s", "KV, GiB", "loaded, GiB",
)  # fmt: skip

_Cell = tuple[str, str]
"""A table's cell: its figure, and what stands small below it."""


@dataclass(frozen=True)
class Report:
    """What was written. missing: in a line, why there are no charts, where there are none."""

    pngs: tuple[Path, ...]
    missing: str | None


def write_report(
    runs: Sequence[EvaluatedRun], path: Path, title: str, *, png: bool = False
) -> Report:
    """Write the page. png: a PNG file per chart beside it, too: `report-n.png` for `report.html`.

    Without matplotlib the page is tables alone, and says what to install.

    Raises:
        InputError: if a file cannot be written.
        ValueError: if there is no run to show.
    """
    if not runs:
        raise ValueError("no run to show")
    missing, charts, pngs = None, [], []
    try:
        for chart in make_charts(runs):
            figure, svg, image = draw(chart), io.BytesIO(), io.BytesIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            charts.append((chart.title, base64.b64encode(svg.getvalue()).decode()))
            if png:
                figure.savefig(image, format="png", dpi=_DPI)
                pngs.append((path.with_name(f"{path.stem}-{chart.name}.png"), image.getvalue()))
    except UnavailableError as error:
        missing = str(error)
    template = resources.files("beamwright.evaluate").joinpath("report.html").read_text("ascii")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(
        title=title,
        intro=_intro(runs),
        several=len(runs) > 1,
        common=common_settings(runs),
        charts=charts,
        missing=missing,
        methods=(_COLUMNS, [[(name, ""), *_cells(run)] for name, run in _by_method(runs)]),
        warned=list(_warned(runs)),
        levels=_levels(runs),
        trees=_trees(runs),
        marks={True: "\u2713 ", False: "\u2717 ", None: ""},
    )
    # ASCII throughout: a model's text may hold what UTF-8 cannot.
    write_whole(path, page.encode("ascii", "xmlcharrefreplace"))
    for file, content in pngs:
        write_whole(file, content)
    return Report(tuple(file for file, _ in pngs), missing)


def _intro(runs: Sequence[EvaluatedRun]) -> str:
    datasets = ", ".join(dict.fromkeys(run.dataset for run in runs))
    counts = sorted({run.summary["problems"] for run in runs})
    problems = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    note = "" if len(counts) == 1 else " - some settings are not finished, so compare with care"
    problem = "problem" if counts[-1] == 1 else "problems"
    setting = "setting" if len(runs) == 1 else "settings"
    return f"{datasets}: {problems} {problem}, {len(runs)} {setting}{note}"


def _by_method(runs: Sequence[EvaluatedRun]) -> list[tuple[str, EvaluatedRun]]:
    """Runs with their methods' names, those of a method together and by n."""
    pairs = zip(method_names(runs), runs, strict=True)
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].n))


def _warned(runs: Sequence[EvaluatedRun]) -> Iterator[str]:
    """Runs whose problems have warnings, with an example of each."""
    for name, run in _by_method(runs):
        warnings = run.summary.get("warnings") or {"problems": 0}
        if warnings["problems"]:
            count = "1 problem" if warnings["problems"] == 1 else f"{warnings['problems']} problems"
            about = f"{name}, n = {run.n}: {count} with a warning, such as: "
            yield about + warnings["example"]


# --- cells of tables ---------------------------------------------------------------------------


def _cells(run: EvaluatedRun) -> Iterator[_Cell]:
    summary = run.summary
    passed = list(summary["pass_at"].values()) or [None]
    per_problem, latency = summary["per_problem"], summary["latency_s"]
    judged, problems = summary["judged"], summary["problems"]
    yield str(run.n), ""
    yield str(problems), "" if judged == problems else f"{judged} judged"
    yield _share({"value": summary["accuracy"], "interval": summary["accuracy_interval"]})
    for how in ("best", "majority", "weighted"):
        yield _share(summary["top1"][how])
    yield _share(passed[0])
    yield _share(passed[-1])
    for estimate in (per_problem["tokens"], per_problem["seconds"], latency["p50"], latency["p95"]):
        yield _number(estimate)
    yield _number(summary["precise_goodput_tok_s"])
    yield _number(per_problem["kv_device_peak_bytes"], GIB)
    yield _number(per_problem["h2d_bytes"], GIB)


def _share(estimate: Mapping[str, Any] | None) -> _Cell:
    if estimate is None or estimate["interval"] is None:
        return "-", ""
    low, high = estimate["interval"]
    return f"{estimate['value']:.1%}", f"{100 * low:.1f} - {100 * high:.1f}"


def _number(estimate: Mapping[str, Any] | None, unit: float = 1.0) -> _Cell:
    if estimate is None:
        return "-", ""
    value, low, high = (
        format_number(figure / unit) for figure in (estimate["value"], *estimate["interval"])
    )
    return value, f"{low} - {high}"


def _levels(runs: Sequence[EvaluatedRun]) -> tuple[list[str], list[list[_Cell]]] | None:
    levels = list(dict.fromkeys(level for run in runs for level in run.summary["by_level"]))
    if not levels:
        return None
    rows = []
    for name, run in _by_method(runs):
        groups = [run.summary["by_level"].get(level) for level in levels]
        shares = [_share(group and {**group, "value": group["accuracy"]}) for group in groups]
        rows.append([(name, ""), (str(run.n), ""), *shares])
    return ["method", "n", *(f"level {level}" for level in levels)], rows


def _trees(
    runs: Sequence[EvaluatedRun],
) -> tuple[list[str], list[tuple[str, list[TreeLink | None]]]] | None:
    """A row per problem and a column per run; a cell is the answer, and leads to the tree."""
    shown = [run for _, run in _by_method(runs) if run.trees]
    if not shown:
        return None
    columns = [{(link.index, link.problem): _shown(link) for link in run.trees} for run in shown]
    links = sorted((link for run in shown for link in run.trees), key=attrgetter("index"))
    rows = [
        (f"{index + 1}. {_shortened(text, 120)}", [cells.get((index, text)) for cells in columns])
        for index, text in dict.fromkeys((link.index, link.problem) for link in links)
    ]
    return [run.name for run in shown], rows


def _shown(link: TreeLink) -> TreeLink:
    answer = "no answer" if link.answer is None else _shortened(link.answer, 24)
    return TreeLink(link.problem, link.index, quote(link.address), answer, link.correct)


def _shortened(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "\u2026"
