"""`beamwright doctor`: reports on this machine, on a checkpoint, or on a verifier's format."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

import beamwright
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import add_row, pause_gc_for_import, print_json, quiet_stdout
from beamwright.errors import InputError, UnsupportedModelError
from beamwright.plan.machines import write_profile
from beamwright.verify.find import check_models

_OPTIONS = (
    "model", "device", "dtype", "attention", "context", "decoder", "weights", "verifier",
    "kv_dtype",
)  # fmt: skip


@with_settings(only=_OPTIONS, recipe=False)
def doctor(
    invocation: Invocation,
    parity: bool = option(
        False, "Compare logits with transformers (needs --model).", flag="--parity"
    ),
    probe: bool = option(
        False, "Measure this machine's speed, for plan --gpu measured.", flag="--probe"
    ),
    show: bool = option(
        False,
        "Show a sample as --verifier reads it: tokens, and where steps are scored.",
        flag="--show",
    ),
) -> None:
    """Check this machine, a checkpoint (--model), or a verifier's format (--verifier --show)."""
    _check_together(invocation, parity=parity, probe=probe, show=show)
    if show:
        with quiet_stdout():
            from beamwright.verify.find import show_verifier

            report = show_verifier(invocation.settings.model)
    elif "model" in invocation.given:
        report = _inspect_model(invocation, parity)
    else:
        with quiet_stdout():
            with pause_gc_for_import("beamwright.checks.machine"):
                from beamwright.checks import machine

            report = {
                "beamwright": beamwright.__version__,
                "python": platform.python_version(),
                **machine.inspect_machine(),
            }
            if probe:  # measure a hardware profile, and save it for `--gpu measured`
                profile = machine.measure_profile()
                file = str(write_profile(profile))
                report |= {"profile": asdict(profile), "profile_file": file}
    if invocation.as_json:
        print_json(report)
    elif show:
        _print_verifier(report)
    else:
        _print_rows(report)


def _check_together(invocation: Invocation, *, parity: bool, probe: bool, show: bool) -> None:
    given = [f"--{name}" for name in ("verifier", "model", "weights") if name in invocation.given]
    given += [flag for flag, on in (("--parity", parity), ("--probe", probe)) if on]
    if show and "--verifier" not in given:
        raise InputError("--show needs --verifier")
    if show and len(given) > 1:
        raise InputError(f"{given[1]} cannot be combined with --show, which reads only --verifier")
    if not show and "--model" not in given and given not in ([], ["--probe"]):
        raise InputError(f"{given[0]} needs --model{' or --show' * (given[0] == '--verifier')}")
    if probe and given != ["--probe"]:
        raise InputError("--probe measures the machine and cannot be combined with --model")


def _inspect_model(invocation: Invocation, parity: bool) -> dict[str, Any]:
    settings = invocation.settings.model
    try:
        with quiet_stdout():
            check_models(settings.model_copy(update={"verifier": "none"}))
            with pause_gc_for_import("beamwright.checks.model"):
                from beamwright.checks.model import check_parity
                from beamwright.models.load import inspect_model

            report = inspect_model(settings)
            if parity:
                report["max_abs_logit_diff"] = check_parity(settings)
            return report
    except UnsupportedModelError as error:
        refusal = {"supported": False, "reason": str(error)}
        (print_json if invocation.as_json else _print_rows)(refusal)
        raise


def _print_rows(report: Mapping[str, Any]) -> None:
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
        elif isinstance(value, list):
            yield from ((name, line) for line in value)
        else:
            yield name, f"{value:,}" if isinstance(value, int) else str(value)


def _print_verifier(report: Mapping[str, Any]) -> None:
    """Print a verifier's report: its format, its text, and the positions that score each step."""
    _print_rows({key: value for key, value in report.items() if key != "steps"})
    table = Table("step", "text", "read at", "tokens there", "score")
    for step in report["steps"]:
        places, tokens = step["read_at"], [repr(text) for text in step["read"]]
        if len(places) > 2:
            places, tokens = [places[0], "...", places[-1]], [tokens[0], "...", tokens[-1]]
        read = (" ".join(map(str, places)) or "nowhere", " ".join(tokens))
        score = "-" if step["score"] is None else f"{step['score']:.3g}"
        add_row(table, str(step["step"]), repr(step["text"]), *read, score)
    Console().print(table)
