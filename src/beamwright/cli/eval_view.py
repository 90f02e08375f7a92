"""Tables of `eval` for people: one setting in full, several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from beamwright.cli.output import add_row, plain

_COLUMNS = ("accuracy", "95 %", "majority", "pass@n", "tokens", "s")


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """One setting, a row per figure."""
    console.print(_table(report))


def print_reports(whole: Mapping[str, Any], console: Console) -> None:
    """Several settings, a row each. tokens and s: per problem."""
    table = Table(
        title=plain(whole["dataset"]), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("setting", overflow="fold", min_width=16)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for report in whole["runs"]:
        if "error" in report:
            add_row(table, report["name"], "failed")
        else:
            add_row(table, report["name"], *_cells(report))
    console.print(table)


def _cells(report: Mapping[str, Any]) -> Iterator[str]:
    interval, passed = report["accuracy_interval"], report["pass_at"]
    per_problem = report["per_problem"]
    yield _shown(report["accuracy"], "{:.1%}")
    yield "-" if interval is None else f"{interval[0]:.0%} - {interval[1]:.0%}"
    yield _shown(report["by_choice"]["majority"], "{:.1%}")
    yield _estimate(list(passed.values())[-1] if passed else None, "{:.1%}")
    yield _estimate(per_problem["tokens"], "{:,.0f}")
    yield _estimate(per_problem["seconds"], "{:,.2f}")


def _estimate(estimate: Mapping[str, Any] | None, form: str) -> str:
    return _shown(None if estimate is None else estimate["value"], form)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _problems(report: Mapping[str, Any]) -> str:
    """How many, how many of them were judged, and how many could not be attempted."""
    parts = [f"{report['problems']:,}"]
    if report["judged"]:
        parts.append(f"{report['judged']:,} judged")
    else:
        parts.append("none judged: the problems name no right answers")
    if report["errors"]:
        parts.append(f"{report['errors']:,} could not be attempted (wrong)")
    return ", ".join(parts)


def _table(report: Mapping[str, Any]) -> Table:
    table = Table(title=plain(report["dataset"]), show_header=False, title_justify="left")
    for name, value in _rows(report):
        add_row(table, name, value)
    return table


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "problems", _problems(report)
    if report["accuracy_interval"] is not None:
        low, high = report["accuracy_interval"]
        yield "accuracy", f"{report['accuracy']:.1%}  (95 %: {low:.1%} to {high:.1%})"
        for how, accuracy in report["by_choice"].items():
            yield f"  chosen by {how}", f"{accuracy:.1%}"
    for level, group in report["by_level"].items():
        if group["accuracy"] is not None:
            yield f"  level {level}", f"{group['accuracy']:.1%} of {group['problems']}"
    warned = report["warnings"]
    if warned["problems"]:
        share = f"{warned['problems']:,} of {report['problems']:,}"
        yield "warnings", f"{share}, such as: {warned['example']}"
    if report["pass_at"]:
        k, estimate = list(report["pass_at"].items())[-1]
        if estimate is not None:
            yield f"pass@{k}", f"{estimate['value']:.1%}"
    figures = (
        ("mean rounds", report["mean_rounds"], "{:.1f}"),
        ("tokens generated", report["tokens"].get("generated"), "{:,}"),
        ("seconds", report["time"].get("total_s"), "{:,.1f}"),
        ("goodput", report["goodput_tok_s"], "{:.1f} tok/s (a path's tokens over its time)"),
        ("latency, median", (report["latency_s"]["p50"] or {}).get("value"), "{:,.2f} s"),
        ("latency, 95 %", (report["latency_s"]["p95"] or {}).get("value"), "{:,.2f} s"),
    )
    for name, value, form in figures:
        if value is not None:
            yield name, form.format(value)
