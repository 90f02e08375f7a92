"""The table of `beamwright simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from beamwright.cli.output import add_row, plain

_GIB = 2**30


def comparison_table(report: Mapping[str, Any]) -> Table:
    """One line per schedule; `report` is what `--json` prints."""
    budget = report["kv_budget_bytes"] / _GIB
    what = f"width {report['width']}" if report["tree"] is None else f"from {report['tree']}"
    title = (
        f"{report['model']} on {report['gpu']} (simulated), {budget:.1f} GiB for KV\n"
        f"{report['n']} beams, {what}, {report['prompt']} + {report['generate']} tokens"
    )
    table = Table(title=plain(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("seconds, GiB", no_wrap=True)
    columns = ("time", "stall", "I/O", "in", "out", "groups", "speedup")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in {**report["schedules"], **(report["ablation"] or {})}.items():
        add_row(table, name, *_cells(each))
    return table


def _cells(each: Mapping[str, Any] | None) -> Iterator[str]:
    if each is None:
        yield "no fit"  # the other cells stay empty
        return
    for name in ("time_s", "stall_s"):
        yield _short(each[name])
    yield f"{each['io_share']:.0%}"
    for name in ("h2d_bytes", "d2h_bytes"):
        yield _short(each[name] / _GIB)
    yield f"{each['groups']:,}"
    speedup = each["speedup_over_layerwise"]
    yield "" if speedup is None else f"{speedup:.1f}x"


def _short(number: float) -> str:
    """About three digits."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"
