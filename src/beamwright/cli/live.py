"""Draw a search's tree: live in a terminal with a status line, or as an SVG picture.

Siblings with equal text share one line with their number, and the paths below them are merged as
well. One line can thus show that 64 beams have written the same step.

The tree is drawn once after every round, by the round's callback. Between rounds the terminal
refreshes only the finished drawing and the status. The terminal's thread never reads the tree,
which the search's thread keeps changing.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.terminal_theme import MONOKAI
from rich.text import Text
from rich.tree import Tree

from beamwright.cli.output import one_line, printable
from beamwright.counters import Progress
from beamwright.io import write_atomically
from beamwright.protocols import RoundReport
from beamwright.search.revise import best_answer_node
from beamwright.search.rounds import sort_by_rank
from beamwright.tree import Node, NodeState, SearchTree

if TYPE_CHECKING:
    from beamwright.solver.solution import Solution

_BAR_CELLS = 8
_LABEL_CHARACTERS = 400  # maximum length of a label; rich cuts labels to the terminal's width
_MAX_ANSWERS = 5
_REFRESH_HZ = 6
_FRAME_LINES = 5  # lines below the tree: answers, last round, status, and the shell's prompt
_PROBLEM_CHARACTERS = 4000
_PICTURE_COLUMNS, _PICTURE_LINES = 100, 35


class StatusLine(Progress):
    """Status line: the engine's current phase and token count. Any thread may call `str` of it."""

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
        """Return the phase, the tokens and their mean rate so far, and the seconds since start."""
        now_s = self._clock()
        parts = [self._what]
        if self._searching_s is not None:
            parts.append(f"{self._num_tokens:,} tokens")
            if now_s > self._searching_s:
                parts.append(f"{self._num_tokens / (now_s - self._searching_s):,.0f} tok/s")
        return " | ".join([*parts, f"{now_s - self._started_s:.0f} s"])


class LiveTree:
    """Draws one search live in a terminal, as a context manager whose `show` is the round callback.

    status: the status line below the tree, read at every refresh.
    """

    def __init__(self, console: Console, problem: str, status: StatusLine) -> None:
        self._console, self._status = console, status
        self._problem = _problem_panel(problem)
        is_utf = console.encoding.lower().startswith("utf")
        self._marks = TreeGlyphs() if is_utf else ASCII
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
        # The final drawing may be longer than the terminal, so include all steps of the surviving
        # paths.
        if self._last is not None:
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
        if self._spinner is None:
            return Group(self._problem, *self._drawn)
        self._spinner.update(text=Text(str(self._status), "cyan", no_wrap=True))
        return Group(self._problem, *self._drawn, self._spinner)


def _problem_panel(problem: str) -> Panel:
    text = Text(printable(problem[:_PROBLEM_CHARACTERS]))
    return Panel(text, title="Problem", title_align="left", border_style="cyan")


def round_line(report: RoundReport) -> str:
    """Return one line about a round: numbers of candidates by outcome, and the seconds so far."""
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
    """Write an SVG picture of the problem, the tree, its answers and the chosen one, in 35 lines.

    Raises:
        InputError: if the file cannot be written.
    """
    tree, stats = solution.tree, solution.tree_stats
    # This console prints nothing. Its recording becomes the SVG file.
    console = Console(
        record=True,
        file=io.StringIO(),
        width=_PICTURE_COLUMNS,
        force_terminal=True,
        legacy_windows=False,
    )
    panel = _problem_panel(tree.root.problem_text or "(synthetic prompt)")
    stated = Text("Answer   ", "bold", no_wrap=True, overflow="ellipsis")
    stated.append(one_line(solution.answer or "no answer"), "bold green")
    spent = f"{solution.rounds} rounds | {stats.nodes:,} nodes | {stats.unique_tokens:,} tokens"
    below = [*filter(None, [draw_answers(tree)]), stated, Text(spent, "dim")]
    room = max(_PICTURE_LINES - len(console.render_lines(panel)) - len(below), 8)
    for part in (panel, draw_tree(tree, max_lines=room), *below):
        console.print(part)
    svg = console.export_svg(title="beamwright solve", theme=MONOKAI)
    write_atomically(file, svg.encode("utf-8", "replace"), "--picture ")


# --- a tree as lines of text ------------------------------------------------------------------


class TreeGlyphs(NamedTuple):
    """The characters of a drawing, which a terminal with ASCII only replaces.

    finished: marks a path that has ended. pruned: marks a pruned path. kept: marks a step of a path
    that continues or ends below this step. full, empty: cells of a score's bar.
    """

    finished: str = "✓"
    pruned: str = "✗"
    kept: str = "•"
    full: str = "━"
    empty: str = "╌"


ASCII = TreeGlyphs("*", "x", ">", "=", ".")


def draw_tree(
    tree: SearchTree,
    marks: TreeGlyphs | None = None,
    max_lines: int | None = None,
    keep_steps: bool = False,
) -> Tree:
    """Draw the decoded part of a search tree, with as much detail as fits into `max_lines`.

    If the tree does not fit, details are dropped in this order: pruned siblings share one line,
    branches whose paths are all pruned share one line, then early steps of the surviving paths are
    left out (never with `keep_steps`). The newest steps are always drawn.
    """
    drawing = _Drawing(marks or TreeGlyphs(), tree)
    newest = drawing.newest_depth
    depths = range(1, 2 if keep_steps else newest + 1)
    details = [(newest + 1, first_depth) for first_depth in depths]
    for dead_from, first_depth in [(1, 1), (newest, 1), *details]:
        root, num_lines = drawing.draw(dead_from, first_depth)
        if max_lines is None or num_lines <= max_lines:
            break
    return root


def draw_answers(tree: SearchTree) -> Text | None:
    """Return one line with the answers of the ended paths, most votes first; None without answers.

    Each answer has the number of its paths and the best of their scores.
    """
    votes: dict[str, list[Node]] = {}
    for leaf in map(best_answer_node, tree.finished()):
        votes.setdefault(leaf.vote or "", []).append(leaf)
    if not votes:
        return None
    line = Text("Answers  ", no_wrap=True, overflow="ellipsis")
    order = sorted(votes.values(), key=lambda leaves: -len(leaves))
    for place, leaves in enumerate(order[:_MAX_ANSWERS]):
        answer = leaves[0].answer
        line.append("" if place == 0 else " | ", "bright_black")
        line.append("no answer" if answer is None else one_line(answer), "bold")
        line.append(f" x{len(leaves)}")
        if scores := _scores(leaves):
            line.append(f" (best {max(scores):.2f})", "bright_black")
    if len(order) > _MAX_ANSWERS:
        line.append(f" | {len(order) - _MAX_ANSWERS} more", "bright_black")
    return line


class _Drawing:
    """Draws a tree at any of several levels of detail."""

    def __init__(self, marks: TreeGlyphs, tree: SearchTree) -> None:
        self._marks, self._tree = marks, tree
        decoded = [node for node in tree.nodes() if _decoded(node)]
        self.newest_depth = max((node.depth for node in decoded), default=1)
        self._max_score = max([1.0, *_scores(decoded)])
        self._alive: set[Node] = set()
        for node in decoded:
            is_tip = node.state is NodeState.KEPT and not any(map(_decoded, node.children))
            if is_tip or node.state in (NodeState.FINISHED, NodeState.CANDIDATE):
                self._alive.update(node.path())

    def draw(self, dead_from: int, first_depth: int) -> tuple[Tree, int]:
        """Draw the tree from `first_depth` on, and return it with its number of lines.

        dead_from: the depth from which on each dead node has a line of its own. At smaller depths,
            dead siblings share one line. No surviving path contains a dead node.
        """
        steps = "step" if first_depth == 2 else "steps"
        hidden = f"({first_depth - 1} earlier {steps})" if first_depth > 1 else ""
        root = Tree(Text(hidden, style="dim"), guide_style="bright_black", hide_root=not hidden)
        num_lines = 1 if hidden else 0
        above = [node for node in self._tree.nodes() if node.depth == first_depth - 1]
        tops = [node for node in above if node in self._alive]
        # An explicit stack instead of recursion: a tree may be deeper than the recursion limit.
        stack: list[tuple[Tree, Sequence[Node]]] = [(root, tops or [self._tree.root])]
        while stack:
            branch, nodes = stack.pop()
            children = [child for node in nodes for child in node.children if _decoded(child)]
            dead, groups = list[Node](), dict[object, list[Node]]()  # by equal text and state
            for each in children:
                alive = each in self._alive
                if alive or each.depth >= dead_from:
                    text = _text(each) or each.token_ids  # without a tokenizer, text is empty
                    state = (text, each.state is NodeState.FINISHED, alive)
                    groups.setdefault(state, []).append(each)
                else:
                    dead.append(each)
            shown = [(branch.add(self._label(equal)), equal) for equal in groups.values()]
            if dead:
                best = "".join(f", best {score:.2f}" for score in sorted(_scores(dead))[-1:])
                text = f"{self._marks.pruned} {len(dead)} pruned{best}"
                branch.add(Text(text, "bright_black", no_wrap=True, overflow="ellipsis"))
            num_lines += len(shown) + bool(dead)
            stack.extend(reversed(shown))
        return root, num_lines

    def _label(self, nodes: Sequence[Node]) -> Text:
        """Return the line of nodes with equal text: the one with the best score, and the number."""
        node, marks = sort_by_rank(nodes)[0], self._marks
        alive, finished = node in self._alive, node.state is NodeState.FINISHED
        share, color = None, "default"
        if node.score is not None:
            share = _share(node.score, self._max_score)
            color = "green" if share > 0.66 else "yellow" if share > 0.33 else "red"
        color = color if alive else "bright_black"
        mark = marks.finished if finished else marks.kept if alive else marks.pruned
        label = Text(no_wrap=True, overflow="ellipsis")
        label.append(f"{mark} ", f"bold {'green' if finished else color}")
        if share is not None:
            filled = round(share * _BAR_CELLS)
            label.append(marks.full * filled, color)
            label.append(marks.empty * (_BAR_CELLS - filled), "bright_black")
            label.append(f" {node.score:.2f}  ", color)
        if len(nodes) > 1:
            label.append(f"x{len(nodes)}  ", "bold cyan" if alive else "dim")
        if node.thought:
            label.append(f"thought, {len(node.token_ids):,} tokens: ", "italic magenta")
        style = "bold green" if finished else "bold" if alive else "dim strike"
        label.append(one_line(_text(node))[:_LABEL_CHARACTERS] or "(empty step)", style)
        return label


def _decoded(node: Node) -> bool:
    return node.state is not NodeState.OPEN


def _text(node: Node) -> str:
    return node.step_text if node.turn is None else node.turn.text


def _scores(nodes: Iterable[Node]) -> list[float]:
    """Return the finite scores of the nodes."""
    return [n.score for n in nodes if n.score is not None and math.isfinite(n.score)]


def _share(score: float, max_score: float) -> float:
    """Return the filled share of a score's bar, from 0 to 1.

    A score of 0 or more is divided by `max_score`: 1 for probabilities, otherwise the largest
    score. A negative score is taken as a log-probability and exponentiated. The share of NaN is 0.
    """
    if math.isnan(score):
        return 0.0
    return min(max(score / max_score if score >= 0 else math.exp(score), 0.0), 1.0)
