"""Problems in flight in a terminal: a row each, the slowest first. Knows reports, no engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from beamwright.cli.live import Status
from beamwright.cli.output import one_line
from beamwright.protocols import RoundReport

MOST_ROWS = 8
_ID_CHARACTERS = 32


@dataclass
class _Row:
    """Of one problem: what its last round has left. round: the one that it is in."""

    began_s: float
    beams: int
    round: int = 1
    num_tokens: int = 0


class ProblemsInFlight(Status):
    """What the engine is doing, and what becomes of every problem in flight.

    `show` is the round callback. What is drawn between rounds is what rounds have said, never a
    tree, which its search goes on changing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._rows: dict[str | int, _Row] = {}

    def began(self, problem_id: str | int, num_beams: int) -> None:
        self._rows[problem_id] = _Row(self._clock(), num_beams)

    def ended(self, problem_id: str | int) -> None:
        self._rows.pop(problem_id, None)

    def show(self, report: RoundReport) -> None:
        """A round is decided."""
        tree = report.tree
        row = self._rows.get(tree.root.problem_id)
        if row is not None:
            row.round, row.beams = report.round + 1, len(tree.open_nodes())
            written = (node for node in tree.nodes() if node.parent and node.turn is None)
            row.num_tokens = sum(len(node.token_ids) for node in written)

    def table(self) -> Table | None:
        """Those that have taken longest, and how many others there are; None for fewer than two."""
        now_s, rows = self._clock(), list(self._rows.items())
        if len(rows) < 2:
            return None
        rows.sort(key=lambda item: item[1].began_s)
        table = Table(box=None, pad_edge=False, header_style="bright_black")
        table.add_column("problem", no_wrap=True, overflow="ellipsis", max_width=_ID_CHARACTERS)
        for name in ("round", "beams", "tokens", "seconds"):
            table.add_column(name, justify="right", no_wrap=True)
        for problem_id, row in rows[:MOST_ROWS]:
            table.add_row(
                Text(one_line(str(problem_id))),
                str(row.round),
                str(row.beams),
                f"{row.num_tokens:,}",
                f"{now_s - row.began_s:.0f}",
            )
        if len(rows) > MOST_ROWS:
            table.add_row(Text(f"and {len(rows) - MOST_ROWS} more", "bright_black"))
        return table
