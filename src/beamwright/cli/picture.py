"""A picture of a search as a terminal shows it when it is over, for a page or a README."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from beamwright.cli.drawing import draw_answers, draw_tree
from beamwright.cli.live import problem_panel
from beamwright.cli.output import one_line
from beamwright.io import write_whole

if TYPE_CHECKING:
    from beamwright.solver.solution import Solution
    from beamwright.tree import SearchTree

_COLUMNS = 100
_LINES = 35


def write_picture(tree: SearchTree, solution: Solution | None, file: Path) -> None:
    """Write the problem, the tree, its answers and the chosen one as SVG, in 35 lines.

    Raises:
        InputError: if the file cannot be written.
    """
    # What is printed goes nowhere but into the record.
    console = Console(
        record=True, file=io.StringIO(), width=_COLUMNS, force_terminal=True, legacy_windows=False
    )
    panel = problem_panel(tree.root.problem_text or "(synthetic prompt)")
    below = [*filter(None, [draw_answers(tree)]), *_ending(solution)]
    num_others = len(console.render_lines(panel)) + len(below)
    console.print(panel)
    console.print(draw_tree(tree, max_lines=max(_LINES - num_others, 8)))
    for line in below:
        console.print(line)
    svg = console.export_svg(title="beamwright solve", theme=MONOKAI)
    write_whole(file, svg.encode("utf-8", "replace"), "--picture ")


def _ending(solution: Solution | None) -> list[Text]:
    if solution is None:
        return []
    stats = solution.tree_stats
    spent = f"{solution.rounds} rounds | {stats.nodes:,} nodes | {stats.unique_tokens:,} tokens"
    stated = Text("Answer   ", "bold", no_wrap=True, overflow="ellipsis")
    stated.append(one_line(solution.answer or "none stated"), "bold green")
    return [stated, Text(spent, "dim")]
