"""One self-contained page that compares evaluations: charts, a table of methods, links to trees.

Knows `EvaluatedRun` only; text of a user reaches the page escaped. The page holds no script and
loads nothing from anywhere; its links lead to tree pages beside it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from beamwright.evaluate.eval_charts import colour_rules, draw_svg, format_number, swatch
from beamwright.evaluate.eval_runs import (
    Chart,
    EvaluatedRun,
    TreeLink,
    common_settings,
    make_charts,
    make_pass_chart,
    method_names,
)
from beamwright.evaluate.page_file import write_page
from beamwright.units import GIB

_COLUMNS = (
    "method", "n", "problems", "accuracy", "best", "majority", "weighted", "pass@1", "pass@n",
    "tokens", "seconds", "p50, s", "p95, s", "goodput, tok/s", "KV, GiB", "loaded, GiB",
)  # fmt: skip
_NOTE = (
    "accuracy: of the answer that the method itself chose; best, majority, weighted: Top-1 by each "
    "vote over the same candidates. pass@k: the unbiased estimate 1 - C(n-c, k) / C(n, k), where c "
    "of the n candidates are right and ended by themselves. p50 and p95: completion latency. "
    "goodput: mean tokens of a final candidate over its mean completion time. tokens and seconds: "
    "per problem. KV (both models', peaks on the device) and loaded (host to device): "
    "of all problems in flight together, not divided (64 / n, or --in-flight: a smaller n may take "
    "more). Below each number its 95 % interval. Nothing was chosen by looking at these problems."
)


def write_eval_page(runs: Sequence[EvaluatedRun], path: Path, title: str) -> list[Chart]:
    """Write the page; returns its charts, in the order of the page.

    Raises:
        InputError: if the file cannot be written.
        ValueError: if there is no run to show.
    """
    if not runs:
        raise ValueError("no run to show")
    charts = make_charts(runs)
    passing = make_pass_chart(runs)
    parts = {
        "title": html.escape(title),
        "intro": html.escape(_intro(runs)),
        "common": _common(runs),
        "legend": _legend(charts[0]) if charts else "",
        "charts": "\n".join(_figure(chart) for chart in charts) or "<p>No answer was judged.</p>",
        "methods": _methods(runs),
        "methods_note": html.escape(_NOTE) + _warned(runs),
        "more": "\n".join(
            part for part in (_pass_section(passing), _levels(runs), _trees(runs)) if part
        ),
    }
    write_page(path, "eval_page", parts, colour_rules())
    return charts if passing is None else [*charts, passing]


def _intro(runs: Sequence[EvaluatedRun]) -> str:
    datasets = ", ".join(dict.fromkeys(run.dataset for run in runs))
    counts = sorted({run.summary["problems"] for run in runs})
    problems = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    note = "" if len(counts) == 1 else " - some settings are not finished, so compare with care"
    problem = "problem" if counts[-1] == 1 else "problems"
    setting = "setting" if len(runs) == 1 else "settings"
    return f"{datasets}: {problems} {problem}, {len(runs)} {setting}{note}"


def _common(runs: Sequence[EvaluatedRun]) -> str:
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in common_settings(runs).items()
    )
    summary = "Settings" if len(runs) == 1 else "Settings that all of them share"
    return f"<details><summary>{summary}</summary><dl>{items}</dl></details>" if items else ""


def _figure(chart: Chart) -> str:
    return f"<figure><figcaption>{html.escape(chart.title)}</figcaption>{draw_svg(chart)}</figure>"


def _legend(chart: Chart) -> str:
    return "".join(
        f"<span>{swatch(line.style)}{html.escape(line.name)}</span>" for line in chart.lines
    )


def _section(name: str, title: str, body: str) -> str:
    heading = f'<h2 id="{name}-title">{html.escape(title)}</h2>'
    return f'<section aria-labelledby="{name}-title">{heading}{body}</section>'


def _pass_section(chart: Chart | None) -> str:
    if chart is None:
        return ""
    body = f'<div class="legend">{_legend(chart)}</div><div class="charts">{_figure(chart)}</div>'
    return _section("pass", "Coverage", body)


# --- tables ----------------------------------------------------------------------------------


def _methods(runs: Sequence[EvaluatedRun]) -> str:
    rows = [[html.escape(name), *_cells(run)] for name, run in _by_method(runs)]
    return _table(_COLUMNS, rows)


def _warned(runs: Sequence[EvaluatedRun]) -> str:
    """Runs whose problems have warnings, with an example of each."""
    lines = []
    for name, run in _by_method(runs):
        found = run.summary.get("warnings") or {"problems": 0}
        if found["problems"]:
            count = "1 problem" if found["problems"] == 1 else f"{found['problems']} problems"
            about = f"{name}, n = {run.n}: {count} with a warning, such as: "
            lines.append(f"<br><strong>{html.escape(about + found['example'])}</strong>")
    return "".join(lines)


def _by_method(runs: Sequence[EvaluatedRun]) -> list[tuple[str, EvaluatedRun]]:
    """Runs with their methods' names, those of a method together and by n."""
    pairs = zip(method_names(runs), runs, strict=True)
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].n))


def _cells(run: EvaluatedRun) -> Iterator[str]:
    summary = run.summary
    passed = list(summary["pass_at"].values())
    per_problem = summary["per_problem"]
    interval = summary["accuracy_interval"]
    own = None
    if interval is not None:
        own = {"value": summary["accuracy"], "interval": interval}
    yield str(run.n)
    judged, problems = summary["judged"], summary["problems"]
    yield str(problems) if judged == problems else f"{problems}<br><small>{judged} judged</small>"
    yield _share(own)
    for how in ("best", "majority", "weighted"):
        yield _share(summary["top1"][how])
    yield _share(passed[0] if passed else None)
    yield _share(passed[-1] if passed else None)
    yield _number(per_problem["tokens"])
    yield _number(per_problem["seconds"])
    yield _number(summary["latency_s"]["p50"])
    yield _number(summary["latency_s"]["p95"])
    yield _number(summary["precise_goodput_tok_s"])
    yield _number(per_problem["kv_device_peak_bytes"], GIB)
    yield _number(per_problem["h2d_bytes"], GIB)


def _share(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    low, high = estimate["interval"]
    return f"{estimate['value']:.1%}<br><small>{100 * low:.1f} - {100 * high:.1f}</small>"


def _number(estimate: Mapping[str, Any] | None, unit: float = 1.0) -> str:
    if estimate is None:
        return "-"
    value, low, high = (each / unit for each in (estimate["value"], *estimate["interval"]))
    low_shown, high_shown = format_number(low), format_number(high)
    return f"{format_number(value)}<br><small>{low_shown} - {high_shown}</small>"


def _levels(runs: Sequence[EvaluatedRun]) -> str:
    levels = list(dict.fromkeys(level for run in runs for level in run.summary["by_level"]))
    if not levels:
        return ""
    rows = []
    for name, run in _by_method(runs):
        groups = run.summary["by_level"]
        cells = [_level(groups.get(level)) for level in levels]
        rows.append([html.escape(name), str(run.n), *cells])
    table = _table(["method", "n", *(f"level {level}" for level in levels)], rows)
    return _section("levels", "Accuracy by level", f'<div class="wide">{table}</div>')


def _level(group: Mapping[str, Any] | None) -> str:
    if group is None or group["interval"] is None:
        return "-"
    return _share({"value": group["accuracy"], "interval": group["interval"]})


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """rows: cells that are markup already."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _trees(runs: Sequence[EvaluatedRun]) -> str:
    """A row per problem and a column per run; a cell is the answer, and leads to the tree."""
    shown = [run for _, run in _by_method(runs) if run.trees]
    if not shown:
        return ""
    cells = [{(link.index, link.problem): _link(link) for link in run.trees} for run in shown]
    links = sorted((link for run in shown for link in run.trees), key=attrgetter("index"))
    problems = dict.fromkeys((link.index, link.problem) for link in links)
    rows = (
        [_problem(*problem), *(each.get(problem, "-") for each in cells)] for problem in problems
    )
    table = _table(["problem", *(run.name for run in shown)], rows)
    return _section("trees", "Single trees", f'<div class="wide">{table}</div>')


def _problem(index: int, text: str) -> str:
    return f"{index + 1}. {html.escape(_shortened(text, 120))}"


def _link(link: TreeLink) -> str:
    mark = {True: "\u2713 ", False: "\u2717 ", None: ""}[link.correct]
    answer = "no answer" if link.answer is None else _shortened(link.answer, 24)
    return f'{mark}<a href="{html.escape(quote(link.address))}">{html.escape(answer)}</a>'


def _shortened(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "\u2026"
