"""`beamwright eval`: a problem set, resumable, with the accuracy so far."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from beamwright.cli import engine
from beamwright.cli.options import Invocation, with_settings
from beamwright.cli.output import print_json, quiet_stdout
from beamwright.errors import BeamwrightError
from beamwright.evaluate import Record, RunOptions, Solved, load_problems, run

if TYPE_CHECKING:
    from beamwright.solver import Solver

_DatasetArgument = Annotated[
    str, typer.Argument(metavar="DATASET", help="bundled:test, bundled:dev or a JSONL file.")
]
_LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Only the first N problems.")
]
_OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write results here, and resume from here."),
]
_InFlightOption = Annotated[
    int | None,
    typer.Option("--in-flight", metavar="N", help="Problems solved together (default: 64 / n)."),
]


@with_settings()
def evaluate(
    invocation: Invocation,
    dataset: _DatasetArgument,
    limit: _LimitOption = None,
    out: _OutOption = None,
    in_flight: _InFlightOption = None,
) -> None:
    """Solve a set of problems and report the accuracy."""
    problem_set = load_problems(dataset, limit)
    settings = invocation.settings

    # Loaded at the first unfinished problem: a complete folder is reported without any model.
    @cache
    def solver() -> Solver:
        return engine.make_solver(settings)

    def solve_many(
        problems: Sequence[tuple[str | int, str]],
    ) -> Sequence[Solved | BeamwrightError]:
        return solver().solve_many(problems)

    with quiet_stdout(), _progress() as on_record:
        options = RunOptions(out, in_flight, on_record)
        report = run(problem_set, solve_many, settings, options)
    if invocation.as_json:
        print_json(report)
    else:
        Console().print(_table(report))


@contextmanager
def _progress() -> Iterator[Callable[[Record, int, int], None]]:
    """A bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
    )
    verdicts: list[bool] = []
    with bar:
        task = bar.add_task("loading models", total=None)

        def on_record(record: Record, done: int, total: int) -> None:
            if record.correct is not None:
                verdicts.append(record.correct)
            share = f"{sum(verdicts) / len(verdicts):.1%}" if verdicts else "not judged"
            bar.update(task, completed=done, total=total, description=f"accuracy {share}")

        yield on_record


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=report["dataset"], show_header=False, title_justify="left")
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "problems", f"{report['problems']:,}"
    if report["accuracy_interval"] is not None:
        low, high = report["accuracy_interval"]
        yield "accuracy", f"{report['accuracy']:.1%}  (95 %: {low:.1%} to {high:.1%})"
        for how, accuracy in report["by_choice"].items():
            yield f"  chosen by {how}", f"{accuracy:.1%}"
    for level, group in report["by_level"].items():
        if group["accuracy"] is not None:
            yield f"  level {level}", f"{group['accuracy']:.1%} of {group['problems']}"
    if report["errors"]:
        yield "could not be attempted", str(report["errors"])
    figures = (
        ("mean rounds", report["mean_rounds"], "{:.1f}"),
        ("tokens generated", report["tokens"].get("generated"), "{:,}"),
        ("seconds", report["time"].get("total_s"), "{:,.1f}"),
        ("goodput", report["goodput_tok_s"], "{:.1f} tok/s"),
    )
    for name, value, form in figures:
        if value is not None:
            yield name, form.format(value)
