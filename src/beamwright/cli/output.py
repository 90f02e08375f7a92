"""Standard output holds the result and nothing else; text from a model is made safe to show."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from beamwright.errors import format_bytes
from beamwright.finite import finite

__all__ = [
    "add_row",
    "figures_table",
    "format_bytes",
    "one_line",
    "plain",
    "print_json",
    "printable",
    "quiet_stdout",
    "short_number",
    "short_time",
]


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what libraries print while working to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def print_json(content: Mapping[str, Any]) -> None:
    """The one JSON object of a command, in ASCII: any terminal or pipe can take it."""
    typer.echo(json.dumps(finite(content), allow_nan=False))


def one_line(text: str) -> str:
    """`text` on one line without control characters (a model may well print an escape)."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def printable(text: str) -> str:
    """`text` with its line breaks, without other control characters."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).strip()


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


def short_time(seconds: float) -> str:
    """`38 min` rather than 2280; below ten minutes the seconds alone."""
    if seconds < 600:
        return short_number(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{short_number(seconds / 3600)} h"
