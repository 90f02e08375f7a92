"""Standard output holds the result and nothing else; errors are one line and an exit code.

Text from a model is made safe to show. Knows no command.
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
LONGEST_LINE = 2000  # characters


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what libraries print while working to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def print_json(content: Mapping[str, Any]) -> None:
    """The one JSON object of a command, in ASCII: any terminal or pipe can take it."""
    typer.echo(json.dumps(nonfinite_as_null(content), allow_nan=False))


def printable(text: str) -> str:
    """`text` with its line breaks, without other control characters (a model may print some)."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).strip()


def one_line(text: str) -> str:
    """`text` on one line without control characters."""
    return " ".join(printable(text).split())


def plain(text: str) -> Text:
    """`text` for rich as it stands: no markup, no emoji codes, no control characters."""
    return Text("".join(c if c.isprintable() or c == "\n" else " " for c in text))


def add_row(table: Table, *cells: str) -> None:
    """A row of `plain` cells: what a file or a model has named is text and nothing else."""
    table.add_row(*map(plain, cells))


def figures_table(first: str, figures: Sequence[str], title: str = "") -> Table:
    """A table of names on the left and figures on the right, without a frame."""
    table = Table(title=plain(title) if title else None, title_justify="left", box=None)
    table.pad_edge = False
    table.add_column(first, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def short_number(number: float) -> str:
    """About three digits, at most six characters up to 10,000: an estimate has no more."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 1:
        return f"{number:.1f}"
    return f"{number:.2f}" if number else "0"


def complain(line: str) -> None:
    """One line on standard error, whatever the text holds, and however long a file has made it."""
    typer.echo(f"beamwright: {one_line(line):.{LONGEST_LINE}}", err=True)


@contextmanager
def guard(debug: bool) -> Iterator[None]:
    """End the command with the exit code of whatever is raised inside.

    2 for bad input, 1 for other failures, 130 for Ctrl-C.
    """
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError as error:  # the reader of our output has gone; nobody to tell
        # Or the interpreter complains when it flushes on its way out.
        sys.stdout = None
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, Exception) as error:
        code = 1
        if isinstance(error, KeyboardInterrupt):
            line, code = "interrupted", INTERRUPTED
        elif isinstance(error, BeamwrightError):
            line, code = f"error: {error}", error.exit_code
        elif isinstance(error, OSError):  # of what nobody reads or writes on purpose: a full disk
            where = str(error.filename or "standard output")
            line = f"error: {where:.500}: {error.strerror or error!s:.500}"
        elif isinstance(error, MemoryError):
            line = "error: out of memory (lower --n, --kv-memory or --host-memory)"
        else:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            line = f"internal error: {what} (--debug shows where)"
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        complain(line)
        # Not from the error: a StopIteration behind it would be taken for this generator's own.
        raise typer.Exit(code) from None


@contextmanager
def first_import(module: str) -> Iterator[None]:
    """Import a module inside. What it leaves is never looked through for garbage.

    Some hundred thousand objects, all of which stay: collections among them take a sixth of the
    time. Only where the module is not there yet, and only here: a process of the command line is
    this program's own.
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
    """Import what an extra brings inside.

    Raises:
        InputError: where it is not installed; one line says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("beamwright"):
            raise
        hint = f"(pip install 'beamwright[{extra}]')"
        raise InputError(f"beamwright {command} needs {error.name} {hint}") from error
