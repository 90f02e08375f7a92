"""The search tree as it grows, in a terminal. Knows nodes and round reports, no engine.

After every round the tree is drawn once from the report; what the terminal refreshes between
rounds is that drawing, never the tree itself, which the search goes on changing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.text import Text
from rich.tree import Tree

from beamwright.cli.output import one_line, printable
from beamwright.protocols import RoundReport
from beamwright.tree import Node, NodeState, SearchTree

_BAR_CELLS = 8
_REFRESH_HZ = 6
_FRAME_LINES = 3  # the status line and room for the prompt below
_PROBLEM_CHARACTERS = 4000
_LABEL_CHARACTERS = 400  # far wider than a terminal; the label is cut to the line anyway


class LiveTree:
    """Shows every round of one search. A context manager; `show` is its round callback."""

    def __init__(self, console: Console, problem: str) -> None:
        self._console = console
        self._problem = Panel(
            Text(printable(problem[:_PROBLEM_CHARACTERS])),
            title="Problem",
            title_align="left",
            border_style="cyan",
        )
        self._marks = _Marks.for_console(console)
        waiting = self._frame(None, "loading models")
        self._live = Live(waiting, console=console, refresh_per_second=_REFRESH_HZ)
        self._last: RoundReport | None = None

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._last is not None:
            # The picture that stays may scroll: no step of a surviving path is left out.
            drawing = draw_tree(self._last.tree, self._marks, self._room(), keep_steps=True)
            self._live.update(Group(self._problem, drawing, Text(round_line(self._last), "cyan")))
        self._live.__exit__(kind, error, trace)

    def show(self, report: RoundReport) -> None:
        """Draw the tree as it stands after a round."""
        self._last = report
        drawing = draw_tree(report.tree, self._marks, self._room())
        self._live.update(self._frame(drawing, round_line(report)), refresh=True)

    def _room(self) -> int:
        """Lines that the tree may take."""
        panel_lines = len(self._console.render_lines(self._problem))
        return max(self._console.height - panel_lines - _FRAME_LINES, 8)

    def _frame(self, drawing: RenderableType | None, status: str) -> RenderableType:
        spinner = Spinner("dots" if self._marks.fancy else "line", Text(status, "cyan"))
        return Group(self._problem, *([] if drawing is None else [drawing]), spinner)


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


# --- drawing ---------------------------------------------------------------------------------


class _Marks:
    """The few signs that need more than ASCII."""

    def __init__(self, fancy: bool) -> None:
        self.fancy = fancy
        self.finished, self.pruned, self.kept = ("✓", "✗", "•") if fancy else ("*", "x", ">")
        self.full, self.empty = ("━", "╌") if fancy else ("=", ".")

    @classmethod
    def for_console(cls, console: Console) -> _Marks:
        return cls(console.encoding.lower().startswith("utf"))


def draw_tree(
    tree: SearchTree,
    marks: _Marks | None = None,
    max_lines: int | None = None,
    keep_steps: bool = False,
) -> Tree:
    """The decoded part of a search tree, with as much detail as fits into `max_lines`.

    Least important first: pruned siblings become one line, branches that died out become one
    line, then early steps of the surviving paths are left out (never with `keep_steps`). The
    newest round goes last.
    """
    drawing = _Drawing(marks or _Marks(fancy=True), tree)
    newest = drawing.newest_depth
    levels: list[Callable[[Node], bool]] = [
        lambda node: True,
        lambda node: node.depth >= newest,
        lambda node: False,
    ]
    root = Tree("")
    if max_lines is None:
        return drawing.draw(levels[0], first_depth=1)[0]
    for show_dead in levels:
        root, num_lines = drawing.draw(show_dead, first_depth=1)
        if num_lines <= max_lines:
            return root
    if keep_steps:
        return root
    for first_depth in range(2, newest + 1):
        root, num_lines = drawing.draw(levels[-1], first_depth)
        if num_lines <= max_lines:
            break
    return root


class _Drawing:
    """Draws one tree at one moment, at several levels of detail."""

    def __init__(self, marks: _Marks, tree: SearchTree) -> None:
        self._marks = marks
        self._tree = tree
        decoded = [node for node in tree.nodes() if _decoded(node)]
        self.newest_depth = max((node.depth for node in decoded), default=1)
        self._alive: set[Node] = set()
        for node in decoded:
            is_tip = node.state is NodeState.KEPT and not any(map(_decoded, node.children))
            if is_tip or node.state in (NodeState.FINISHED, NodeState.CANDIDATE):
                self._alive.update(node.path())
        self._num_lines = 0
        known = [node.score for node in decoded if node.score is not None]
        self._most = max([1.0, *filter(math.isfinite, known)])

    def draw(self, show_dead: Callable[[Node], bool], first_depth: int) -> tuple[Tree, int]:
        """The tree and its number of lines; dead nodes are drawn where `show_dead`."""
        hidden = f"({first_depth - 1} earlier steps)" if first_depth > 1 else ""
        root = Tree(Text(hidden, style="dim"), guide_style="bright_black", hide_root=not hidden)
        self._num_lines = 1 if hidden else 0
        tops = [
            node
            for node in self._tree.nodes()
            if node.depth == first_depth - 1 and node in self._alive
        ]
        for top in tops or [self._tree.root]:
            self._add_children(root, top, show_dead)
        return root, self._num_lines

    def _add_children(self, branch: Tree, node: Node, show_dead: Callable[[Node], bool]) -> None:
        # An explicit stack: deep trees are legal, and the recursion limit is not ours.
        stack = [(branch, node)]
        while stack:
            branch, node = stack.pop()
            dead: list[Node] = []
            shown: list[tuple[Tree, Node]] = []
            for child in filter(_decoded, node.children):
                if child in self._alive or show_dead(child):
                    self._num_lines += 1
                    shown.append((branch.add(self._label(child)), child))
                else:
                    dead.append(child)
            if dead:
                self._num_lines += 1
                branch.add(self._dead_line(dead))
            stack.extend(reversed(shown))

    def _label(self, node: Node) -> Text:
        alive = node in self._alive
        finished = node.state is NodeState.FINISHED
        mark = self._marks.finished if finished else self._marks.kept if alive else ""
        color = _score_color(node.score, self._most) if alive else "bright_black"
        label = Text(no_wrap=True, overflow="ellipsis")
        label.append(f"{mark or self._marks.pruned} ", f"bold {'green' if finished else color}")
        if node.score is not None:
            filled = round(_share(node.score, self._most) * _BAR_CELLS)
            label.append(self._marks.full * filled, color)
            label.append(self._marks.empty * (_BAR_CELLS - filled), "bright_black")
            label.append(f" {node.score:.2f}  ", color)
        style = "bold green" if finished else "bold" if alive else "dim strike"
        text = node.step_text if node.turn is None else node.turn.text
        label.append(one_line(text)[:_LABEL_CHARACTERS] or "(empty step)", style)
        return label

    def _dead_line(self, dead: list[Node]) -> Text:
        scores = [node.score for node in dead if node.score is not None]
        best = f", best {max(scores):.2f}" if scores else ""
        line = Text(f"{self._marks.pruned} {len(dead)} pruned{best}", style="bright_black")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def _decoded(node: Node) -> bool:
    return node.state is not NodeState.OPEN


def _share(score: float, most: float) -> float:
    """How full a bar is: a probability as it is, a log-probability exponentiated.

    most: the largest score, which fills the bar; 1 where scores are probabilities. A score that
    is no number has an empty bar.
    """
    if math.isnan(score):
        return 0.0
    return min(max(score / most if score >= 0 else math.exp(score), 0.0), 1.0)


def _score_color(score: float | None, most: float) -> str:
    if score is None:
        return "default"
    share = _share(score, most)
    return "green" if share > 0.66 else "yellow" if share > 0.33 else "red"
