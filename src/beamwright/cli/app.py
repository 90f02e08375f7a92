"""The `beamwright` command: its subcommands, and usage errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import beamwright
from beamwright.cli.doctor import doctor
from beamwright.cli.eval import evaluate
from beamwright.cli.guard import INTERRUPTED, complain
from beamwright.cli.plan import plan
from beamwright.cli.report import report
from beamwright.cli.simulate import simulate
from beamwright.cli.solve import solve

_USAGE_ERROR = 2


def _make_app() -> typer.Typer:
    app = typer.Typer(
        name="beamwright",
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_about)
    app.command("solve")(solve)
    app.command("eval")(evaluate)
    app.command("report")(report)
    app.command("plan")(plan)
    app.command("simulate")(simulate)
    app.command("doctor")(doctor)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"beamwright {beamwright.__version__}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Verifier-guided tree search on one small GPU or a laptop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad usage or input, or 1."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        result = _make_app()(words, prog_name="beamwright", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        # typer's usage errors share no public base class; all of them can format themselves.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        complain(f"error: {describe().replace('Value error, ', '')}")
        return _USAGE_ERROR
    return result if isinstance(result, int) else 0
