"""The table of `beamwright simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from beamwright.cli.machine import Machine
from beamwright.cli.output import add_row, format_bytes, plain, short_number

_GIB = 2**30


def comparison_view(report: Mapping[str, Any], machine: Machine) -> Group:
    """One line per schedule; `report` is what `--json` prints."""
    notes = [
        "over: how many times as fast as layer-wise with a copy per beam (dense), and with shared "
        "KV (tree); in: GiB loaded from host memory"
    ]
    if report["link_bandwidth"] is not None:
        notes.append(f"the link is emulated at {report['link_bandwidth'] / 1e9:g} GB/s")
    if machine.why is not None:
        notes.append(machine.why)
    notes.append(f"{machine.profile.name}: {machine.source}")
    return Group(_table(report), *map(plain, notes))


def _table(report: Mapping[str, Any]) -> Table:
    budget = f"{format_bytes(report['kv_budget_bytes'])} for KV"
    models = report["model"]
    if report["verifier"] is not None:
        models += f", scored by {report['verifier']},"
        budget += f", {format_bytes(report['verifier_kv_budget_bytes'])} for the verifier's"
    what = f"width {report['width']}" if report["tree"] is None else f"from {report['tree']}"
    title = (
        f"{models} on {report['gpu']} (simulated), {budget}\n"
        f"{report['n']} beams, {what}, {report['prompt']} + {report['generate']} tokens"
    )
    table = Table(title=plain(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("seconds", no_wrap=True)
    columns = ("total", "verify", "stall", "in", "groups", "over dense", "over tree")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in report["schedules"].items():
        add_row(table, name.replace("/", ", "), *_cells(each))
    for name, each in (report["ablation"] or {}).items():
        add_row(table, name.removeprefix("locality/").replace(":", ": "), *_cells(each))
    return table


def _cells(each: Mapping[str, Any] | None) -> Iterator[str]:
    if each is None:
        yield "no fit"  # the other cells stay empty
        return
    for name in ("time_s", "verify_s", "stall_s"):
        yield short_number(each[name])
    yield short_number(each["h2d_bytes"] / _GIB)
    yield f"{each['groups']:,}"
    for layout in ("dense", "tree"):
        speedup = each[f"speedup_over_layerwise_{layout}"]
        yield "" if speedup is None else f"{speedup:.1f}x"
