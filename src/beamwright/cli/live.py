"""A search as it runs: the tree in a terminal, or lines. Knows nodes and reports, no engine.

After every round the tree is drawn once from the report; what the terminal refreshes between
rounds is that drawing and the time, never the tree itself, which the search goes on changing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.text import Text
from rich.tree import Tree

from beamwright.cli.drawing import Marks, draw_answers, draw_tree
from beamwright.cli.output import printable
from beamwright.config import Settings
from beamwright.errors import format_bytes
from beamwright.progress import Progress
from beamwright.protocols import RoundReport
from beamwright.search import strategy_row

_REFRESH_HZ = 6
_FRAME_LINES = 5  # answers, the last round, the status line and room for the prompt below
_PROBLEM_CHARACTERS = 4000
_QUIET_S = 10.0  # between two lines, at most


class Status(Progress):
    """What the engine is doing, in one line that any thread may ask for.

    settings: of the one search that it shows; they may say when it ends.
    """

    def __init__(
        self, settings: Settings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._started_s = clock()
        self._what = "starting"
        self._searching_s: float | None = None
        self._num_tokens = 0

    def doing(self, what: str) -> None:
        self._what = what

    def wrote(self, num_tokens: int) -> None:
        if self._searching_s is None:
            self._searching_s = self._clock()
        self._num_tokens += num_tokens

    def line(self) -> str:
        """The phase, tokens and their rate so far, time since the start and time that is left."""
        now_s = self._clock()
        parts = [self._what]
        if self._searching_s is not None:
            parts.append(f"{self._num_tokens:,} tokens")
            if now_s > self._searching_s:
                rate = self._num_tokens / (now_s - self._searching_s)
                parts.append(f"{rate:,.0f} tok/s")
        parts.append(f"{now_s - self._started_s:.0f} s")
        if self._settings is not None:
            parts += self._of_search(self._settings, now_s)
        return " | ".join(parts)

    def _of_search(self, settings: Settings, now_s: float) -> Iterator[str]:
        if self._searching_s is not None and now_s > self._searching_s:
            passed_s = now_s - self._searching_s
            ends = [] if settings.stop.deadline is None else [settings.stop.deadline]
            ends += [passed_s * total / max(1, self._num_tokens) for total in _totals(settings)]
            if ends:
                yield f"about {max(0.0, min(ends) - passed_s):.0f} s left"
        if settings.schedule.link_bandwidth is not None:
            yield f"link emulated at {format_bytes(settings.schedule.link_bandwidth)}/s"


def _totals(settings: Settings) -> list[int]:
    """Tokens that a search will have generated, where that is known: its budget, or paths of a
    fixed length that are extended side by side."""
    stop, step, search = settings.stop, settings.step, settings.search
    totals = [] if stop.token_budget is None else [stop.token_budget]
    if step.ignore_eos and step.step_tokens is not None and strategy_row(search).by_level:
        longest = search.max_rounds * step.step_tokens
        totals.append(search.n * min(step.max_tokens or longest, longest))
    return totals


class LiveTree:
    """Shows every round of one search. A context manager; `show` is its round callback.

    status: what is shown below the tree, asked for at every refresh.
    """

    def __init__(self, console: Console, problem: str, status: Status) -> None:
        self._console, self._status = console, status
        self._problem = problem_panel(problem)
        self._marks = Marks.for_console(console)
        self._spinner: Spinner | None = Spinner("dots" if self._marks.fancy else "line")
        self._drawn: tuple[RenderableType, ...] = ()
        self._last: RoundReport | None = None
        self._live = Live(
            get_renderable=self._frame, console=console, refresh_per_second=_REFRESH_HZ
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._last is not None:
            # The picture that stays may scroll: no step of a surviving path is left out.
            drawing = draw_tree(self._last.tree, self._marks, self._room(), keep_steps=True)
            self._drawn = self._below(drawing, self._last)
        self._spinner = None
        self._live.stop()

    def show(self, report: RoundReport) -> None:
        """Draw the tree after a round."""
        self._last = report
        drawing = draw_tree(report.tree, self._marks, self._room())
        self._drawn = self._below(drawing, report)
        self._live.refresh()

    def _below(self, drawing: Tree, report: RoundReport) -> tuple[RenderableType, ...]:
        answers = draw_answers(report.tree)
        return (drawing, *([] if answers is None else [answers]), Text(round_line(report), "cyan"))

    def _room(self) -> int:
        """Lines that the tree may take."""
        panel_lines = len(self._console.render_lines(self._problem))
        return max(self._console.height - panel_lines - _FRAME_LINES, 8)

    def _frame(self) -> RenderableType:
        spinner = self._spinner
        if spinner is None:
            return Group(self._problem, *self._drawn)
        spinner.update(text=Text(self._status.line(), "cyan", no_wrap=True))
        return Group(self._problem, *self._drawn, spinner)


class ProgressLines:
    """A line per round, and one on what goes on where rounds are long. A context manager.

    write: takes a line, from any thread. quiet_s: the longest time without one.
    """

    def __init__(
        self, write: Callable[[str], None], status: Status, quiet_s: float = _QUIET_S
    ) -> None:
        self._write, self._status, self._quiet_s = write, status, quiet_s
        self._said, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._said.set()
        self._thread.join()

    def show(self, report: RoundReport) -> None:
        """A round is complete."""
        self._said.set()
        self._write(round_line(report))

    def _fill(self) -> None:
        while not self._ended:
            if not self._said.wait(self._quiet_s):
                self._write(self._status.line())
            self._said.clear()


def problem_panel(problem: str) -> Panel:
    """The problem in a frame."""
    return Panel(
        Text(printable(problem[:_PROBLEM_CHARACTERS])),
        title="Problem",
        title_align="left",
        border_style="cyan",
    )


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
