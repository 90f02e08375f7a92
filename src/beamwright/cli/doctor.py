"""`beamwright doctor`: what this machine and a checkpoint can do here."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from beamwright.cli import engine
from beamwright.cli.options import Invocation, with_settings
from beamwright.cli.output import add_row, print_json, quiet_stdout
from beamwright.errors import InputError, UnsupportedModelError

_ParityOption = Annotated[
    bool, typer.Option("--parity", help="Compare logits with transformers (needs --model).")
]
_ProbeOption = Annotated[
    bool,
    typer.Option("--probe", help="Measure this machine's rates, for plan --gpu measured."),
]
_ProblemsOption = Annotated[
    int,
    typer.Option(
        "--problems",
        metavar="COUNT",
        min=0,
        help="With --weights or --verifier-weights: bundled problems searched with and without.",
    ),
]
_OPTIONS = (
    "model", "device", "dtype", "attention", "context", "weights", "verifier", "verifier_weights",
)  # fmt: skip


@with_settings(only=_OPTIONS, recipe=False)
def doctor(
    invocation: Invocation,
    parity: _ParityOption = False,
    probe: _ProbeOption = False,
    problems: _ProblemsOption = 20,
) -> None:
    """Check this machine, or a checkpoint given by --model.

    With --weights or --verifier-weights: how far they move logits, scores and answers.
    """
    if "model" not in invocation.given:
        _reject_without_model(invocation, parity)
        with quiet_stdout():
            report = {"python": platform.python_version(), **engine.inspect_machine()}
            if probe:
                report |= engine.probe_machine()
        _show(report, invocation.as_json)
        return
    if probe:
        raise InputError("--probe measures the machine: it goes without --model")
    settings = invocation.settings.model
    try:
        with quiet_stdout():
            report = engine.inspect_model(settings)
            if parity:
                report["max_abs_logit_diff"] = engine.check_parity(settings)
            if settings.weights != "auto" or settings.verifier_weights != "auto":
                report |= engine.check_weights(settings, problems)
    except UnsupportedModelError as error:
        _show({"supported": False, "reason": str(error)}, invocation.as_json)
        raise
    _show(report, invocation.as_json)


def _reject_without_model(invocation: Invocation, parity: bool) -> None:
    if parity:
        raise InputError("--parity needs --model")
    for name in ("verifier", "weights", "verifier_weights"):
        if name in invocation.given:
            raise InputError(f"--{name.replace('_', '-')} needs --model")


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
