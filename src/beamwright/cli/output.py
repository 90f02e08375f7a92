"""Helpers for the output of all commands.

Standard output holds only the result of a command. An error is one line on standard error and an
exit code. Control characters in a model's text are removed before it is shown.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from beamwright.errors import BeamwrightError, InputError
from beamwright.io import nonfinite_as_null

INTERRUPTED = 130
LONGEST_LINE = 2000  # maximum number of characters of an error line


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Redirect everything that libraries print to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def print_json(content: Mapping[str, Any]) -> None:
    """Print a command's one JSON object, in ASCII, so that every terminal and pipe can show it."""
    typer.echo(json.dumps(nonfinite_as_null(content), allow_nan=False))


def printable(text: str) -> str:
    """Return `text` without control characters, which a model may generate, except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).strip()


def one_line(text: str) -> str:
    """Return `text` on one line, without control characters."""
    return " ".join(printable(text).split())


def plain(text: str) -> Text:
    """Return `text` as literal text for rich: markup and emoji codes have no effect.

    Control characters except line breaks are replaced by blanks.
    """
    return Text("".join(c if c.isprintable() or c == "\n" else " " for c in text))


def add_row(table: Table, *cells: str) -> None:
    """Add a row of literal text, since names from files or models may contain rich's markup."""
    table.add_row(*map(plain, cells))


def figures_table(first: str, figures: Sequence[str], title: str = "") -> Table:
    """Return an empty table without a frame, for names and right-aligned figures.

    first: the heading of the column of names. figures: the headings of the other columns.
    """
    table = Table(title=plain(title) if title else None, title_justify="left", box=None)
    table.pad_edge = False
    table.add_column(first, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def short_number(number: float) -> str:
    """Return `number` as text with about three digits, enough for an estimate."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 1:
        return f"{number:.1f}"
    return f"{number:.2f}" if number else "0"


def print_error_line(line: str) -> None:
    """Print `line` to standard error as one line of at most `LONGEST_LINE` characters."""
    typer.echo(f"beamwright: {one_line(line):.{LONGEST_LINE}}", err=True)


@contextmanager
def exit_on_error(debug: bool) -> Iterator[None]:
    """End the process with an error line and an exit code if the `with` block raises.

    The exit code is 2 for bad input, 1 for other failures and 130 for Ctrl-C.
    """
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError as error:  # the reader of standard output has closed the pipe
        # Drop the stream: flushing it at exit would print another error.
        sys.stdout = None
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, Exception) as error:
        code = 1
        if isinstance(error, KeyboardInterrupt):
            line, code = "interrupted", INTERRUPTED
        elif isinstance(error, BeamwrightError):
            line, code = f"error: {error}", error.exit_code
        # Problems with the user's files raise InputError. Other OSErrors are, say, a full disk.
        elif isinstance(error, OSError):
            where = str(error.filename or "standard output")
            line = f"error: {where:.500}: {error.strerror or error!s:.500}"
        elif isinstance(error, MemoryError):
            line = "error: out of memory. Lower --n, --kv-memory or --host-memory."
        else:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            line = f"internal error: {what}. Use --debug for the traceback"
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        print_error_line(line)
        # `from None`, because `contextmanager` misreads an exception whose cause is a
        # StopIteration.
        raise typer.Exit(code) from None


@contextmanager
def pause_gc_for_import(module: str) -> Iterator[None]:
    """Switch Python's garbage collector off while the caller's block imports `module`.

    The import creates some hundred thousand objects that live to the end of the process, and
    collecting garbage among them takes a sixth of the import's time. The objects are also excluded
    from later collections (`gc.freeze`). If the module is loaded already, the collector stays on.
    Only the command line does this, because it owns the process; a library must not.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def needs_extra(command: str, extra: str = "serve") -> Iterator[None]:
    """Name the missing extra if an import in the `with` block fails.

    Raises:
        InputError: if a package is missing; the message names the extra to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("beamwright"):
            raise
        hint = f"Run pip install 'beamwright[{extra}]'"
        raise InputError(f"beamwright {command} needs the package {error.name}. {hint}") from error
