"""`--search list`: every strategy in a line, with its knobs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from beamwright.search import STRATEGIES


def print_strategies() -> None:
    """The table of strategies on standard output."""
    table = Table("--search", "what it does", "knobs", "answer", box=None, header_style="bold")
    for name, row in STRATEGIES.items():
        shared = ["n", "width"] if row.reads_width else ["n"]
        knobs = [f"--{knob.replace('_', '-')}" for knob in (*shared, *row.knobs)]
        table.add_row(name, row.meaning, " ".join(knobs), row.choose)
    Console().print(table)
