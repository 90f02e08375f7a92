"""The `beamwright` command: its subcommands, and usage errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
from beamwright.errors import BeamwrightError
from beamwright.plugins import load_all

_USAGE_ERROR = 2
_COMMANDS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "solve": solve,
        "eval": evaluate,
        "report": report,
        "plan": plan,
        "simulate": simulate,
        "doctor": doctor,
    }
)


def _make_app(only: str | None = None) -> typer.Typer:
    """All commands, or the one of that name if there is one: the others' options take a while.

    Raises:
        InputError: if an option of a plugin's has a name that a command built here takes.
    """
    app = typer.Typer(
        name="beamwright",
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_about)
    for name, command in _COMMANDS.items():
        if only == name or only not in _COMMANDS:
            getattr(command, "declare_options", lambda: None)()  # `report` has no settings
            app.command(name)(command)
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
        for line in load_all(_named_plugins(words)):
            complain(line)
        result = _make_app(words[0])(words, prog_name="beamwright", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return INTERRUPTED
    except BeamwrightError as error:  # of a plugin; commands end in `guard`
        complain(f"error: {error}")
        return error.exit_code
    except Exception as error:
        # typer's usage errors share no public base class; all of them can format themselves.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        complain(f"error: {describe().replace('Value error, ', '')}")
        return _USAGE_ERROR
    return result if isinstance(result, int) else 0


def _named_plugins(words: Sequence[str]) -> list[str]:
    """The files that `--plugin` names: they are run before it is known which options there are."""
    written = words[: words.index("--")] if "--" in words else words
    pairs = zip(written, [*written[1:], ""], strict=True)
    following = [after for word, after in pairs if word == "--plugin" and after]
    return following + [word.partition("=")[2] for word in written if word.startswith("--plugin=")]
