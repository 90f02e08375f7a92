"""A search as it runs: the tree in a terminal, a line of status; and a picture of it for a page.

After every round the tree is drawn once from the report; what the terminal refreshes between
rounds is that drawing and the time, never the tree itself, which the search goes on changing.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.terminal_theme import MONOKAI
from rich.text import Text

from beamwright.cli.drawing import ASCII, Marks, draw_answers, draw_tree
from beamwright.cli.output import one_line, printable
from beamwright.counters import Progress
from beamwright.io import write_whole
from beamwright.protocols import RoundReport

if TYPE_CHECKING:
    from beamwright.solver.solution import Solution

_REFRESH_HZ = 6
_FRAME_LINES = 5  # answers, the last round, the status line and room for the prompt below
_PROBLEM_CHARACTERS = 4000
_PICTURE_COLUMNS, _PICTURE_LINES = 100, 35


class Status(Progress):
    """What the engine is doing; as text it is one line, that any thread may ask for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started_s = clock, clock()
        self._what = "starting"
        self._searching_s: float | None = None
        self._num_tokens = 0

    def doing(self, what: str) -> None:
        self._what = what

    def wrote(self, num_tokens: int) -> None:
        if self._searching_s is None:
            self._searching_s = self._clock()
        self._num_tokens += num_tokens

    def __str__(self) -> str:
        """The phase, tokens and their rate so far, and the time since the start."""
        now_s = self._clock()
        parts = [self._what]
        if self._searching_s is not None:
            parts.append(f"{self._num_tokens:,} tokens")
            if now_s > self._searching_s:
                parts.append(f"{self._num_tokens / (now_s - self._searching_s):,.0f} tok/s")
        return " | ".join([*parts, f"{now_s - self._started_s:.0f} s"])


class LiveTree:
    """Shows every round of one search. A context manager; `show` is its round callback.

    status: what is shown below the tree, asked for at every refresh.
    """

    def __init__(self, console: Console, problem: str, status: Status) -> None:
        self._console, self._status = console, status
        self._problem = _problem_panel(problem)
        is_utf = console.encoding.lower().startswith("utf")
        self._marks = Marks() if is_utf else ASCII
        self._spinner: Spinner | None = Spinner("dots" if is_utf else "line")
        self._drawn: tuple[RenderableType, ...] = ()
        self._last: RoundReport | None = None
        self._live = Live(
            get_renderable=self._frame, console=console, refresh_per_second=_REFRESH_HZ
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._last is not None:  # what stays may scroll: no step of a surviving path is left out
            self._draw(self._last, keep_steps=True)
        self._spinner = None
        self._live.stop()

    def show(self, report: RoundReport) -> None:
        """Draw the tree after a round."""
        self._last = report
        self._draw(report, keep_steps=False)
        self._live.refresh()

    def _draw(self, report: RoundReport, *, keep_steps: bool) -> None:
        panel_lines = len(self._console.render_lines(self._problem))
        room = max(self._console.height - panel_lines - _FRAME_LINES, 8)
        answers = filter(None, [draw_answers(report.tree)])
        drawing = draw_tree(report.tree, self._marks, room, keep_steps)
        self._drawn = (drawing, *answers, Text(round_line(report), "cyan"))

    def _frame(self) -> RenderableType:
        spinner = self._spinner
        if spinner is None:
            return Group(self._problem, *self._drawn)
        spinner.update(text=Text(str(self._status), "cyan", no_wrap=True))
        return Group(self._problem, *self._drawn, spinner)


def _problem_panel(problem: str) -> Panel:
    text = Text(printable(problem[:_PROBLEM_CHARACTERS]))
    return Panel(text, title="Problem", title_align="left", border_style="cyan")


def round_line(report: RoundReport) -> str:
    """One line about one round; who waits is a candidate of a later one."""
    judged = len(report.survivors) + len(report.pruned) + len(report.finished)
    waiting = 0 if report.tree.done else len(report.candidates) - judged
    parts = [
        f"round {report.round}",
        f"{len(report.candidates)} candidates",
        f"{len(report.survivors)} kept",
        f"{len(report.pruned)} pruned",
        f"{waiting} waiting" if waiting else "",
        f"{len(report.finished)} finished" if report.finished else "",
        f"{report.elapsed_s:.1f} s",
    ]
    return " | ".join(part for part in parts if part)


def write_picture(solution: Solution, file: Path) -> None:
    """Write the problem, the tree, its answers and the chosen one as SVG, in 35 lines.

    Raises:
        InputError: if the file cannot be written.
    """
    tree, stats = solution.tree, solution.tree_stats
    # What is printed goes nowhere but into the record.
    console = Console(
        record=True,
        file=io.StringIO(),
        width=_PICTURE_COLUMNS,
        force_terminal=True,
        legacy_windows=False,
    )
    panel = _problem_panel(tree.root.problem_text or "(synthetic prompt)")
    stated = Text("Answer   ", "bold", no_wrap=True, overflow="ellipsis")
    stated.append(one_line(solution.answer or "none stated"), "bold green")
    spent = f"{solution.rounds} rounds | {stats.nodes:,} nodes | {stats.unique_tokens:,} tokens"
    below = [*filter(None, [draw_answers(tree)]), stated, Text(spent, "dim")]
    room = max(_PICTURE_LINES - len(console.render_lines(panel)) - len(below), 8)
    for part in (panel, draw_tree(tree, max_lines=room), *below):
        console.print(part)
    svg = console.export_svg(title="beamwright solve", theme=MONOKAI)
    write_whole(file, svg.encode("utf-8", "replace"), "--picture ")
