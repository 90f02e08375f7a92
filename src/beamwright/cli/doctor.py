"""`beamwright doctor`: this machine, a checkpoint, or how a verifier reads a sample."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import add_row, first_import, print_json, quiet_stdout
from beamwright.errors import InputError, UnsupportedModelError
from beamwright.verify.find import check_models

_ParityOption = Annotated[
    bool, option("--parity", "Compare logits with transformers (needs --model).")
]
_ProbeOption = Annotated[
    bool, option("--probe", "Measure this machine's rates, for plan --gpu measured.")
]
_ShowOption = Annotated[
    bool, option("--show", "How --verifier reads a sample: its tokens, and where steps are scored.")
]
_OPTIONS = ("model", "device", "dtype", "attention", "context", "weights", "verifier")


@with_settings(only=_OPTIONS, recipe=False)
def doctor(
    invocation: Invocation,
    parity: _ParityOption = False,
    probe: _ProbeOption = False,
    show: _ShowOption = False,
) -> None:
    """Check this machine, a checkpoint given by --model, or with --show one given by --verifier."""
    if show:
        _show_verifier(invocation, parity, probe)
        return
    if "model" not in invocation.given:
        _reject_without_model(invocation, parity)
        with quiet_stdout():
            with first_import("beamwright.checks.machine"):
                from beamwright.checks import machine

            report = {"python": platform.python_version(), **machine.inspect_machine()}
            if probe:
                report |= machine.probe_machine()
        _show(report, invocation.as_json)
        return
    if probe:
        raise InputError("--probe measures the machine: it goes without --model")
    settings = invocation.settings.model
    try:
        with quiet_stdout():
            check_models(settings.model_copy(update={"verifier": "none"}))
            with first_import("beamwright.checks.model"):
                from beamwright.checks.model import check_parity
                from beamwright.models.load import inspect_model

            report = inspect_model(settings)
            if parity:
                report["max_abs_logit_diff"] = check_parity(settings)
    except UnsupportedModelError as error:
        _show({"supported": False, "reason": str(error)}, invocation.as_json)
        raise
    _show(report, invocation.as_json)


def _show_verifier(invocation: Invocation, parity: bool, probe: bool) -> None:
    if "verifier" not in invocation.given:
        raise InputError("--show needs --verifier")
    apart = [f"--{name}" for name in ("model", "weights") if name in invocation.given]
    apart += [f"--{name}" for name, on in (("parity", parity), ("probe", probe)) if on]
    if apart:
        raise InputError(f"{apart[0]}: --show looks at --verifier only")
    with quiet_stdout():
        from beamwright.verify.find import show_verifier

        report = show_verifier(invocation.settings.model)
    if invocation.as_json:
        print_json(report)
    else:
        print_verifier(report)


def _reject_without_model(invocation: Invocation, parity: bool) -> None:
    if parity:
        raise InputError("--parity needs --model")
    for name, other in (("verifier", " or --show"), ("weights", "")):
        if name in invocation.given:
            raise InputError(f"--{name} needs --model{other}")


def _show(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    table = Table(show_header=False)
    for name, value in _rows(report):
        add_row(table, name, value)
    Console().print(table)


def _rows(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in report.items():
        name = prefix + key.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _rows(value, f"{name}: ")
        elif isinstance(value, bool) or value is None:
            yield name, {True: "yes", False: "no", None: "-"}[value]
        elif isinstance(value, float):
            yield name, f"{value:.2e}"
        else:
            yield name, f"{value:,}" if isinstance(value, int) else str(value)


def print_verifier(report: Mapping[str, Any]) -> None:
    """Print what `verify.find` shows: the format, the text, and where each step is read."""
    console, table = Console(), Table(show_header=False)
    for name in ("verifier", "folder", "format", "head", "activation"):
        add_row(table, name, str(report[name]))
    add_row(table, "scored", report["scores"].replace("_", " "))
    add_row(table, "read at", report["read"].replace("_", " "))
    add_row(table, "score of a step", f"{report['combine']} of the tokens that are read")
    add_row(table, "score of a path", f"{report['aggregate']} of its steps")
    add_row(table, "text", repr(report["text"]))
    console.print(table)
    table = Table("step", "text", "read at", "tokens there", "score")
    for step in report["steps"]:
        add_row(
            table,
            str(step["step"]),
            repr(step["text"]),
            _ends([str(at) for at in step["read_at"]]),
            _ends([repr(text) for text in step["read"]]),
            _score(step["score"]),
        )
    add_row(table, "path", "", "", "", _score(report["score"]))
    console.print(table)


def _ends(items: list[str]) -> str:
    """All of a few, the first and the last of many."""
    if not items:
        return "nowhere"
    return ", ".join(items) if len(items) <= 2 else f"{items[0]} ... {items[-1]} ({len(items)})"


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:.3g}"
