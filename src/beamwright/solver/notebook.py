"""Progress line of searches in a notebook's cell. Outside notebooks nothing is shown."""

from __future__ import annotations

import sys
import time
from typing import Any

from beamwright.counters import Progress

# Minimum seconds between two messages to the browser.
_BETWEEN_S = 0.25


def usual_progress() -> Progress:
    """Return the default progress: a line in a notebook, otherwise nothing."""
    # A notebook's kernel has already imported IPython and ipykernel. Look for them without an
    # import, which would slow down other programs.
    python = sys.modules.get("IPython") if "ipykernel" in sys.modules else None
    shell = None if python is None else python.get_ipython()
    return Progress() if getattr(shell, "kernel", None) is None else CellProgress(shell)


class CellProgress(Progress):
    """One line for all searches of a notebook cell, updated while they run.

    shell: the IPython shell. Its execution_count tells which cell runs.
    """

    def __init__(self, shell: Any) -> None:
        self._shell, self._cell = shell, None
        self._line: Any = None
        self._what, self._num_tokens = "", 0
        self._began_s = self._shown_s = 0.0

    def doing(self, what: str) -> None:
        self._what = what
        self._show()

    def wrote(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._show()

    def ended(self) -> None:
        self._what = "done"
        self._show(at_once=True)

    def _show(self, *, at_once: bool = False) -> None:
        from IPython.display import display  # noqa: PLC0415 (only in notebooks)

        now_s = time.monotonic()
        begins = self._shell.execution_count != self._cell
        if begins:
            self._cell, self._began_s, self._num_tokens = self._shell.execution_count, now_s, 0
        if not (begins or at_once) and now_s < self._shown_s + _BETWEEN_S:
            return
        tokens = f" | {self._num_tokens:,} tokens" if self._num_tokens else ""
        line = {"text/plain": f"{self._what}{tokens} | {now_s - self._began_s:.1f} s"}
        if begins:
            self._line = display(line, raw=True, display_id=True)
        else:
            self._line.update(line, raw=True)
        self._shown_s = now_s
