"""The tables of `beamwright simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from beamwright.cli.machine import Machine
from beamwright.cli.output import add_row, figures_table, plain, short_number
from beamwright.errors import format_bytes
from beamwright.units import GIB


def comparison_view(report: Mapping[str, Any], machine: Machine) -> Group:
    """Return the tables, with one line per schedule, and notes. report: what `--json` prints."""
    notes = [
        "over dense, over tree: speedup over layer-wise with a copy of KV per beam, and with "
        "shared KV; in: GiB loaded from the host"
    ]
    tables: list[Any] = [_table(report)]
    if report["engines"] is not None:
        tables += ["", _engines_table(report["engines"])]
        notes.append(
            "engines: in vLLM and SGLang each step is a new request, and shared KV is stored once; "
            "by row: attention reads shared KV for each beam, which is their default; once (and "
            "the columns after it): it is read once; again: tokens that were recomputed"
        )
    if report["speculation"] != "off":
        notes.append(_ahead(report))
    if report["sparse"] is not None:
        notes.append(_sparse(report["sparse"]))
    if report["engines_left_out"] is not None:
        notes.append(f"no engines were simulated: {report['engines_left_out']}")
    if report["link_bandwidth"] is not None:
        notes.append(f"the link is emulated at {report['link_bandwidth'] / 1e9:g} GB/s")
    if machine.why is not None:
        notes.append(machine.why)
    notes.append(f"{machine.profile.name}: {machine.source}")
    return Group(*tables, *map(plain, notes))


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
    columns = ("total", "verify", "stall", "in", "groups", "over dense", "over tree")
    table = figures_table("seconds", columns, title)
    for name, each in report["schedules"].items():
        add_row(table, name.replace("/", ", "), *_cells(each))
    for name, each in (report["ablation"] or {}).items():
        add_row(table, name.removeprefix("locality/").replace(":", ": "), *_cells(each))
    return table


def _engines_table(engines: Mapping[str, Any]) -> Table:
    columns = ("by row", "once", "stall", "in", "again", "over dense", "over tree")
    table = figures_table("seconds", columns)
    for name, each in engines.items():
        share = 1 if each is None else each["once"]["completed"]
        left = "" if share == 1 else f" ({share:.0%} of the tree)"
        add_row(table, name + left, *_engine_cells(each))
    return table


def _ahead(report: Mapping[str, Any]) -> str:
    """Say how many tokens were speculated under each schedule, and the share that was kept."""
    found = []
    for name, each in report["schedules"].items():
        if each is not None and each["speculated_tokens"]:
            tokens = each["speculated_tokens"]
            kept = f"{each['kept_tokens'] / tokens:.0%} kept"
            found.append(f"{name.replace('/', ', ')} {tokens:,} tokens, {kept}")
    what = "; ".join(found) or "nothing"
    return f"--speculation {report['speculation']}: speculated tokens: {what}"


def _sparse(found: Mapping[str, Any]) -> str:
    """Describe sparse decoding with KV on the host, compared with the fastest full attention."""
    named = f"--sparse {found['method']} --sparse-home host"
    if found["decode_s"] is None:
        return f"{named}: no fit"
    times, hidden = found["times"], found["hidden_share"]
    over = "" if times is None else f", {times:.2f}x the fastest schedule's decoding"
    share = "" if hidden is None else f", {hidden:.0%} of selections hidden"
    return (
        f"{named}: {short_number(found['decode_s'])} s of decoding{over}, waiting "
        f"{short_number(found['waited_s'])} s, in {short_number(found['h2d_bytes'] / GIB)} GiB, "
        f"{found['rows']} rows at a time{share}"
    )


def _engine_cells(each: Mapping[str, Any] | None) -> Iterator[str]:
    if each is None:
        yield "no fit"
        return
    once = each["once"]
    for seconds in (each["by_row"]["time_s"], once["time_s"], once["stall_s"]):
        yield short_number(seconds)
    yield short_number(once["h2d_bytes"] / GIB)
    yield f"{once['recomputed_tokens']:,}"
    yield from _speedups(once)


def _cells(each: Mapping[str, Any] | None) -> Iterator[str]:
    if each is None:
        yield "no fit"  # the other cells stay empty
        return
    for name in ("time_s", "verify_s", "stall_s"):
        yield short_number(each[name])
    yield short_number(each["h2d_bytes"] / GIB)
    yield f"{each['groups']:,}"
    yield from _speedups(each)


def _speedups(each: Mapping[str, Any]) -> Iterator[str]:
    for layout in ("dense", "tree"):
        speedup = each[f"speedup_over_layerwise_{layout}"]
        yield "" if speedup is None else f"{speedup:.1f}x"
