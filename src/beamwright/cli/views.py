"""Files that show a search: the timeline, the tree page, the recorded tree (`solve`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from beamwright.cli import engine
from beamwright.errors import InputError

if TYPE_CHECKING:
    from beamwright.runtime.timeline import Timeline
    from beamwright.solution import Solution
    from beamwright.tree import SearchTree


@dataclass
class Views:
    """Which files to write, and what is collected for them."""

    trace: Path | None = None
    tree: Path | None = None
    record_tree: Path | None = None
    _timeline: Timeline | None = field(default=None, init=False)
    _seen: SearchTree | None = field(default=None, init=False)

    def check(self) -> None:
        """Find out before the search that a file cannot be written.

        Raises:
            InputError: if a file's folder does not exist.
        """
        named = {"trace": self.trace, "tree": self.tree, "record-tree": self.record_tree}
        for option, path in named.items():
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise InputError(f"--{option} {path}: cannot be written there")

    def timeline(self) -> Timeline | None:
        """Where the engine writes what ran when; None if nobody asked."""
        if self.trace is not None or self.tree is not None:
            self._timeline = engine.make_timeline()
        return self._timeline

    def saw(self, tree: SearchTree) -> None:
        """A round of this tree is complete."""
        self._seen = tree

    def write(self, solution: Solution | None) -> None:
        """Write what was asked for."""
        if self._seen is not None:
            engine.write_views(self._seen, solution, self._timeline, self)
