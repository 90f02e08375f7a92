"""Files that show a search: timeline, tree page, recorded tree; for `eval`, many tree pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from beamwright.errors import BeamwrightError, InputError
from beamwright.io import check_writable

if TYPE_CHECKING:
    from beamwright.engine.timeline import Timeline
    from beamwright.evaluate.problems import Problem
    from beamwright.solver.solution import Solution
    from beamwright.tree import SearchTree


@dataclass
class Views:
    """Which files to write, and what is collected for them."""

    trace: Path | None = None
    tree: Path | None = None
    record_tree: Path | None = None
    picture: Path | None = None
    _timeline: Timeline | None = field(default=None, init=False)
    _seen: SearchTree | None = field(default=None, init=False)

    def check(self) -> None:
        """Find out before the search that a file cannot be written.

        Raises:
            InputError: if a file's folder does not exist.
        """
        named = {"trace": self.trace, "tree": self.tree, "record-tree": self.record_tree}
        named["picture"] = self.picture
        for option, path in named.items():
            if path is not None:
                check_writable(path, f"--{option} ")

    def timeline(self) -> Timeline | None:
        """Where the engine writes what ran when; None if nobody asked."""
        if self.trace is not None or self.tree is not None:
            from beamwright.engine.timeline import Timeline

            self._timeline = Timeline()
        return self._timeline

    def observe(self, tree: SearchTree) -> None:
        """A round of this tree is complete."""
        self._seen = tree

    def write(self, solution: Solution | None) -> None:
        """Write what was asked for."""
        tree = self._seen
        if tree is None:
            return
        if self.trace is not None and self._timeline is not None:
            from beamwright.evaluate.trace_file import write_trace

            write_trace(self._timeline, self.trace, _title(tree))
        if self.tree is not None:
            _write_page(self.tree, tree, solution, self._timeline)
        if self.record_tree is not None:
            from beamwright.saved.recorded import write_recorded

            write_recorded(tree, self.record_tree)
        if self.picture is not None:
            from beamwright.cli.picture import write_picture

            write_picture(tree, solution, self.picture)


def _title(tree: SearchTree) -> str:
    return tree.root.problem_text or "synthetic prompt"


def _write_page(
    file: Path, tree: SearchTree, solution: Solution | None, timeline: Timeline | None = None
) -> None:
    from beamwright.engine.timeline import NullTimeline
    from beamwright.serve.runs import write_tree_page

    chosen = None if solution is None else tree.node(solution.lineage)
    write_tree_page(tree, chosen, timeline or NullTimeline(), file, _title(tree))


class TreePages:
    """Pages of some problems' trees, one file per problem, named by its place in the set.

    failure: why a page could not be written. The results go on without pages then.
    """

    def __init__(self, folder: Path, problems: Sequence[Problem]) -> None:
        self._folder = folder
        self._files = {each.unique_id: folder / f"{each.index:04d}.html" for each in problems}
        self.failure: InputError | None = None

    def write(self, outcomes: Sequence[Solution | BeamwrightError]) -> None:
        """Write the pages of those of the problems that were solved."""
        for outcome in outcomes:
            if isinstance(outcome, BeamwrightError) or self.failure is not None:
                continue
            file = self._files.get(str(outcome.problem_id))
            if file is None:
                continue
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                _write_page(file, outcome.tree, outcome)
            except InputError as error:
                self.failure = error
            except OSError as error:
                self.failure = InputError(f"{self._folder}: cannot be made ({error.strerror})")
