"""The `beamwright` command: its subcommands, and usage errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import beamwright
from beamwright.cli.output import INTERRUPTED, complain
from beamwright.errors import BeamwrightError

_USAGE_ERROR = 2
_HELP_ALL = "--help-all"
_GROUP = "beamwright.commands"
"""Entry points of installed packages: commands, such as the lab's `simulate`."""


@dataclass(frozen=True)
class _Command:
    """A subcommand: a function of a module, imported if it is the one that runs.

    summary: what the list of all commands says about it.
    """

    module: str
    function: str
    summary: str

    def load(self, everything: bool) -> Callable[..., None]:
        """The command with its options. everything: its help shows them all."""
        command: Callable[..., None]
        command = getattr(import_module(self.module), self.function)
        if declare := getattr(command, "declare_options", None):  # `report` has no settings
            declare(everything)
        return command

    def listed(self) -> Callable[..., None]:
        """What stands for it in the list."""

        def never_called() -> None: ...

        never_called.__doc__ = self.summary
        return never_called


_COMMANDS: Mapping[str, _Command] = MappingProxyType(
    {
        "solve": _Command(
            "beamwright.cli.solve", "solve", "Solve one problem by verifier-guided tree search."
        ),
        "eval": _Command(
            "beamwright.cli.eval", "evaluate", "Solve a set of problems and report the accuracy."
        ),
        "report": _Command(
            "beamwright.cli.report",
            "report",
            "Make one page of evaluations: accuracy against n, tokens, seconds and KV.",
        ),
        "view": _Command(
            "beamwright.cli.view",
            "view",
            "Open saved searches in the browser: replay, compare, export.",
        ),
        "serve": _Command(
            "beamwright.cli.serve",
            "serve",
            "Serve an OpenAI-compatible API, a page that shows trees growing, and metrics.",
        ),
        "plan": _Command(
            "beamwright.cli.plan",
            "plan",
            "Estimate memory, traffic and time of a search under each schedule. Loads no model.",
        ),
        "doctor": _Command(
            "beamwright.cli.doctor",
            "doctor",
            "Check this machine, a checkpoint given by --model, "
            "or with --show one given by --verifier.",
        ),
    }
)


def _commands(only: str | None) -> Mapping[str, _Command]:
    """All commands: those here, and, unless `only` is one of them, those of installed packages."""
    if only in _COMMANDS:
        return _COMMANDS
    installed = {
        point.name: _Command(
            point.module, point.attr, (point.dist.metadata["Summary"] or "") if point.dist else ""
        )
        for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name)
    }
    return {**installed, **_COMMANDS}


class _Commands(TyperGroup):
    """Commands that are imported when they run, or when a shell completes their options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A command of this name with its options; `--help-all` is a help that shows them all."""
        row = _commands(args[0]).get(args[0])
        if row is not None:
            everything = ctx.resilient_parsing or _HELP_ALL in _before_dashes(args)
            single = typer.Typer(rich_markup_mode="rich", add_completion=False)
            single.command(args[0])(row.load(everything))
            self.add_command(get_command(single), args[0])
            args = ["--help" if everything and word == _HELP_ALL else word for word in args]
        return super().resolve_command(ctx, args)


def make_app(only: str | None = None) -> typer.Typer:
    """All commands by what the list says of them. only: see `_commands`."""
    app = typer.Typer(
        name="beamwright",
        cls=_Commands,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_about)
    for name, row in _commands(only).items():
        app.command(name)(row.listed())
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
        plugins = _named_plugins(words)
        if plugins or entry_points(group="beamwright.plugins"):  # else --help waits for no pydantic
            from beamwright.declare import load_all

            for line in load_all(plugins):
                complain(line)
        if _named_command(words) == "":
            words = ["--help" if word == _HELP_ALL else word for word in words]
        app = make_app(_named_command(words))
        result = app(words, prog_name="beamwright", standalone_mode=False)
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
        complain(f"error: {_hint(error) or describe().replace('Value error, ', '')}")
        return _USAGE_ERROR
    return result if isinstance(result, int) else 0


def _hint(error: Exception) -> str:
    """The line about an option, or a command, that is none: what may have been meant by it."""
    flag = getattr(error, "option_name", None)
    if flag is not None:
        from beamwright.cli.options import meant_by

        context = getattr(error, "ctx", None)
        params = [] if context is None else context.command.params
        offered = [flag for param in params for flag in param.opts]
        return f"No such option: {flag}. {meant_by(flag, offered)}".rstrip()
    missing = "No such command 'simulate'." in str(error)
    return f"{error} It is the lab's: pip install -e lab" if missing else ""


def _named_command(words: Sequence[str]) -> str:
    """The first word that is no option: none of those before a command takes a value."""
    return next((word for word in words if not word.startswith("-")), "")


def _named_plugins(words: Sequence[str]) -> list[str]:
    """The files that `--plugin` names: they are run before it is known which options there are."""
    written = _before_dashes(words)
    pairs = zip(written, [*written[1:], ""], strict=True)
    following = [after for word, after in pairs if word == "--plugin" and after]
    return following + [word.partition("=")[2] for word in written if word.startswith("--plugin=")]


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    """Those that may be options."""
    return words[: words.index("--")] if "--" in words else words
