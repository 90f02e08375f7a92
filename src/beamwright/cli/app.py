"""The `beamwright` command: imports and runs subcommands, and prints usage errors on one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import beamwright
from beamwright.cli.output import INTERRUPTED, print_error_line
from beamwright.errors import BeamwrightError
from beamwright.io import installed_entry_points

_USAGE_ERROR = 2
_HELP_ALL = "--help-all"
# Entry point group in which installed packages declare commands, such as the lab's `simulate`.
_GROUP = "beamwright.commands"

# Module, function and summary of a subcommand, whose module is imported only if the command runs.
_Row = tuple[str, str, str]

# Built-in subcommands by name: module in this package, function and summary.
_COMMANDS = MappingProxyType[str, tuple[str, str, str]](
    {
        "demo": ("demo", "demo", "Solve one bundled problem by search and by a vote."),
        "solve": ("solve", "solve", "Solve one problem by verifier-guided tree search."),
        "eval": ("eval", "evaluate", "Solve a set of problems and report the accuracy."),
        "verify": (
            "verify",
            "verify",
            "Repeat searches from their receipts and compare the trees.",
        ),
        "report": (
            "pages",
            "report",
            "Write one page about evaluations: accuracy, tokens, seconds.",
        ),
        "view": ("pages", "view", "Open saved searches in the browser: replay, compare, export."),
        "serve": ("serve", "serve", "Serve an OpenAI-compatible API, a live page and metrics."),
        "mcp": ("mcp", "mcp", "Serve the tool `solve` to agents (Model Context Protocol)."),
        "plan": ("plan", "plan", "Estimate memory and time of a search. Loads no model."),
        "doctor": ("doctor", "doctor", "Check this machine, a checkpoint or a verifier."),
    }
)

# Summaries of the commands that exist if the lab package is installed.
_LAB = MappingProxyType(
    {
        "probe": "Train a verifier on the generator's hidden states, from finished runs.",
        "simulate": "Simulate a search under several schedules and on serving engines. "
        "Loads no model.",
    }
)


def make_app() -> typer.Typer:
    """Build the application from the table of commands and the commands of installed packages."""
    rows: dict[str, _Row] = {
        point.name: (
            point.module,
            point.attr,
            _LAB.get(point.name) or (point.dist and point.dist.metadata["Summary"]) or "",
        )
        for point in sorted(installed_entry_points(_GROUP), key=lambda point: point.name)
    }
    for name, (module, function, summary) in _COMMANDS.items():
        rows[name] = (f"beamwright.cli.{module}", function, summary)

    class Commands(TyperGroup):
        """Command group that imports a command when it runs or a shell completes its options."""

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """Import the named command and declare its options.

            `--help-all` is replaced by `--help`, for which all options are then shown.
            """
            if args[0] in rows:
                everything = ctx.resilient_parsing or _HELP_ALL in _before_dashes(args)
                self.add_command(_import_command(args[0], rows[args[0]], everything), args[0])
                args = ["--help" if everything and word == _HELP_ALL else word for word in args]
            return super().resolve_command(ctx, args)

    app = typer.Typer(
        name="beamwright", cls=Commands, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(_about)
    for name, (_, _, summary) in rows.items():
        app.command(name, help=summary)(_never_called)
    return app


def _import_command(name: str, row: _Row, everything: bool) -> Any:
    """Import a command and return it with its options.

    everything: True if the command's help shows all options; False for the common ones.
    """
    module, function, _ = row
    command = getattr(import_module(module), function)
    if declare := getattr(command, "declare_options", None):  # `report`, for one, has no settings
        declare(everything)
    single = typer.Typer(rich_markup_mode="rich", add_completion=False)
    single.command(name)(command)
    return get_command(single)


def _never_called() -> None: ...


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
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = given or ["--help"]
    try:
        plugins = _named_plugins(words)
        # Load plugins, which import pydantic, only if a command runs or a shell completes options
        # (which calls `main` without arguments). A mere `--help` then answers sooner.
        completes_or_runs = not given or any(not word.startswith("-") for word in words)
        if plugins or (completes_or_runs and installed_entry_points("beamwright.plugins")):
            from beamwright.declare import load_plugins

            for line in load_plugins(plugins):
                print_error_line(line)
        # The arguments have options but no command. None of these options takes a value.
        if all(word.startswith("-") for word in words):
            words = ["--help" if word == _HELP_ALL else word for word in words]
        result = make_app()(words, prog_name="beamwright", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print_error_line("interrupted")
        return INTERRUPTED
    except (
        BeamwrightError
    ) as error:  # raised by a plugin; `exit_on_error` handles errors of commands
        print_error_line(f"error: {error}")
        return error.exit_code
    except Exception as error:
        # typer's usage errors share no public base class, but all have `format_message`.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        print_error_line(f"error: {_hint(error) or describe().replace('Value error, ', '')}")
        return _USAGE_ERROR
    return result if isinstance(result, int) else 0


def _hint(error: Exception) -> str:
    """Return a helpful error line for an unknown option, value or command.

    The result is "" if the error's own message says enough.
    """
    flag = getattr(error, "option_name", None)
    if flag is not None:
        from beamwright.cli.options import suggest_flags

        context = getattr(error, "ctx", None)
        params = [] if context is None else context.command.params
        offered = [flag for param in params for flag in param.opts]
        return f"No such option: {flag}. {suggest_flags(flag, offered)}".rstrip()
    from beamwright.config import removed_options

    value = " ".join(str(getattr(error, "format_message", str)()).split("'")[1:4:2])
    if value in removed_options():
        return f"unknown value {value}. {removed_options()[value]}"
    is_missing = any(f"No such command '{name}'." in str(error) for name in _LAB)
    return f"{error} It needs the lab: pip install -e lab" if is_missing else ""


def _named_plugins(words: Sequence[str]) -> list[str]:
    """Return the files given by `--plugin`, read from the raw arguments.

    Plugins declare options, so they must run before the arguments are parsed.
    """
    written = _before_dashes(words)
    pairs = zip(written, [*written[1:], ""], strict=True)
    following = [after for word, after in pairs if word == "--plugin" and after]
    return following + [word.partition("=")[2] for word in written if word.startswith("--plugin=")]


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    """Return the arguments before `--`, since later arguments are no options."""
    return words[: words.index("--")] if "--" in words else words
