"""The page of `beamwright plan`: the answer, the total and its parts, then the times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from beamwright.cli.machine import Machine
from beamwright.cli.output import add_row, figures_table, plain, short_number, short_time
from beamwright.errors import format_bytes
from beamwright.units import GIB

_MEANINGS = (
    "in-gpu: all KV on the device. layerwise: layers streamed for every token. locality: group "
    "by group to the end of the step. dense: a copy of shared KV per beam; tree: shared KV once. "
    "loaded: GiB of KV from host memory."
)


def plan_view(report: Mapping[str, Any], machine: Machine) -> Group:
    """`report` is what `--json` prints."""
    parts: list[RenderableType] = [answer_line(report), total_line(report), _memory(report), ""]
    parts += [_schedules(report), _MEANINGS, ""]
    parts += [*_notes(report, machine)]
    return Group(*(plain(part) if isinstance(part, str) else part for part in parts))


def answer_line(report: Mapping[str, Any]) -> str:
    """How many beams fit, and the cheapest change where that is not enough."""
    how = "up to" if report["fits"] else "about"
    return f"{how} {report['max_beams_in_gpu']:,} beams fit; {report['advice']}"


def total_line(report: Mapping[str, Any]) -> str:
    """What everything resident takes of what there is, and what follows."""
    memory = report["memory"]
    least, most, limit = (memory[f"{name}_bytes"] / GIB for name in ("least", "needed", "limit"))
    what = "needs"
    if memory["kv_memory_given"]:
        fixed = (
            memory["generator_weight_bytes"]
            + memory["verifier_weight_bytes"]
            + memory["activation_bytes"]
        ) / GIB
        what, least, most, limit = "KV needs", least - fixed, most - fixed, limit - fixed
    if report["fits"]:
        return f"{what} {_gib(most)} of {_gib(limit)} GiB: fits"
    if report["borderline"]:
        return (
            f"{what} {_gib(least)} to {_gib(most)} of {_gib(limit)} GiB: borderline "
            "(searches differ; the largest go to host memory)"
        )
    other = [name for name in ("locality/tree", "layerwise/tree") if _runs(report, name)]
    rest = "keeps the rest in host memory (below)" if other else "is no way out either"
    schedule = other[0].partition("/")[0] if other else "locality"
    return f"{what} {_gib(least)} of {_gib(limit)} GiB: does not fit; {schedule} {rest}"


def _runs(report: Mapping[str, Any], name: str) -> bool:
    return report["schedules"][name]["time_s"] is not None


def _gib(number: float) -> str:
    return f"{number:.1f}" if number >= 0.95 else f"{number:.2g}"


def _memory(report: Mapping[str, Any]) -> Table:
    memory, verifier = report["memory"], report["verifier"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("GiB")
    for column in ("weights", "KV", "KiB/token"):
        table.add_column(column, justify="right", no_wrap=True)

    def row(role: str, name: str, stored: str, sizes: tuple[int, int, int]) -> None:
        weights, kv, per_token = sizes
        kept = "" if stored == "plain" else f" ({stored})"
        add_row(
            table,
            f"{role} {name}{kept}",
            _gib(weights / GIB),
            _gib(kv / GIB),
            f"{per_token / 1024:g}",
        )

    sizes = (report["weight_bytes"], memory["generator_kv_bytes"], report["kv_bytes_per_token"])
    row("generator", report["model"], report["weights"], sizes)
    if verifier is not None:
        sizes = (
            verifier["weight_bytes"],
            memory["verifier_kv_bytes"],
            verifier["kv_bytes_per_token"],
        )
        row("verifier", verifier["model"], verifier["weights"], sizes)
    add_row(table, "activations, of either", _gib(memory["activation_bytes"] / GIB))
    copies = "rounding" if memory["kv_memory_given"] else "attention's working copies of KV"
    if memory["copies_bytes"] > GIB / 100:
        add_row(table, copies, "", _gib(memory["copies_bytes"] / GIB))
    if memory["left_bytes"]:
        add_row(table, "left for more KV, and for what else runs", _gib(memory["left_bytes"] / GIB))
    if memory["outside_bytes"] > GIB / 100:
        add_row(table, "of the device, but not to be used", _gib(memory["outside_bytes"] / GIB))
    return table


def _schedules(report: Mapping[str, Any]) -> Table:
    title = (
        f"{report['n']} beams, width {report['width']}, {report['prompt']} + {report['generate']} "
        f"tokens in steps of {report['step_tokens']} on {report['gpu']}"
    )
    table = figures_table("seconds", ("total", "decode", "verify", "stall", "loaded"), title)
    table.add_column("limited by", no_wrap=True)
    for each in report["schedules"].values():
        add_row(table, f"{each['schedule']}, {each['attention']}", *_cells(each))
    return table


def _cells(each: Mapping[str, Any]) -> Iterator[str]:
    if each["time_s"] is None:
        yield "no fit"  # the other cells stay empty
        return
    for name in ("time_s", "decode_s", "verify_s", "stall_s"):
        yield short_time(each[name])
    yield short_number(each["h2d_bytes"] / GIB)
    yield "memory: borderline" if each["borderline"] else each["limited_by"]


def _notes(report: Mapping[str, Any], machine: Machine) -> Iterator[str]:
    budgets = f"{format_bytes(report['kv_budget_bytes'])} of KV for the generator"
    if report["verifier"] is not None:
        budgets += f", {format_bytes(report['verifier']['kv_budget_bytes'])} for the verifier"
    yield budgets
    if report["unscored_tokens"]:
        yield (
            f"the longest paths exceed the verifier's context by {report['unscored_tokens']:,} "
            "tokens: their last steps would get no score"
        )
    if machine.why is not None:
        yield machine.why
    reserved, interpreter = (
        report["memory"][f"{name}_bytes"] / GIB for name in ("reserved", "interpreter")
    )
    if reserved:
        yield f"{reserved:.1f} GiB is left to CUDA and the display"
    if interpreter:
        yield f"beside that, an interpreter with torch takes up to {interpreter:.1f} GiB"
    yield f"{machine.profile.name}: {machine.source}"
