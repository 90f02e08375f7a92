"""`--search list`: every strategy in a line, with its options."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from beamwright.registry import flag_of
from beamwright.search import STRATEGIES


def print_strategies() -> None:
    """The table of strategies on standard output."""
    table = Table("--search", "what it does", "options", "answer", box=None, header_style="bold")
    for name, row in STRATEGIES.items():
        shared = ["n", "width"] if row.reads_width else ["n"]
        options = map(flag_of, (*shared, *row.options))
        table.add_row(name, row.meaning, " ".join(options), row.choose)
    Console().print(table)
