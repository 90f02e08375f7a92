"""`beamwright doctor`: what this machine and a checkpoint can do here."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from beamwright.cli.imports import first_import
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import add_row, print_json, quiet_stdout
from beamwright.cli.verifier_view import print_verifier
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
_ProblemsOption = Annotated[
    int,
    option(
        "--problems",
        "With --weights or --verifier-weights: bundled problems searched with and without.",
        "COUNT",
        min=0,
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
    show: _ShowOption = False,
    problems: _ProblemsOption = 20,
) -> None:
    """Check this machine, a checkpoint given by --model, or with --show one given by --verifier.

    With --weights or --verifier-weights: how far they move logits, scores and answers.
    """
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
            with first_import("beamwright.checks.parity"):
                from beamwright.checks.parity import check_parity
                from beamwright.models import inspect_model

            report = inspect_model(settings)
            if parity:
                report["max_abs_logit_diff"] = check_parity(settings)
            if settings.weights != "auto" or settings.verifier_weights != "auto":
                from beamwright.checks.drift import check_weights

                report |= check_weights(settings, problems)
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
        from beamwright.verify.show import show_verifier

        report = show_verifier(invocation.settings.model)
    if invocation.as_json:
        print_json(report)
    else:
        print_verifier(report)


def _reject_without_model(invocation: Invocation, parity: bool) -> None:
    if parity:
        raise InputError("--parity needs --model")
    for name in ("verifier", "weights", "verifier_weights"):
        if name in invocation.given:
            other = " or --show" if name != "weights" else ""
            raise InputError(f"--{name.replace('_', '-')} needs --model{other}")


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
