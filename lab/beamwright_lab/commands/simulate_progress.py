"""The progress bar of `beamwright simulate`: the current simulation, its round, and the total."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich import progress as bars
from rich.console import Console
from rich.table import Column

from beamwright.counters import Progress


class SimulationBar(Progress):
    """A progress bar over several simulations, each of `num_tokens` tokens.

    Call `begin` before each. A simulation that ended early, or did not fit, then counts as done.
    """

    def __init__(self, bar: bars.Progress, num_simulations: int, num_tokens: int) -> None:
        self._bar, self._num_tokens = bar, num_tokens
        self._name, self._begun, self._wrote = "", 0, 0
        self._task = bar.add_task("", total=num_simulations * num_tokens)

    def begin(self, name: str) -> Self:
        """Start the next simulation. name: its schedule or engine."""
        self._name, self._wrote = name, 0
        self._begun += 1
        self.doing("starting")
        return self

    def doing(self, what: str) -> None:
        self._update(description=f"{self._name}: {what}")

    def wrote(self, num_tokens: int) -> None:
        self._wrote += num_tokens
        self._update()

    def _update(self, description: str | None = None) -> None:
        # Speculation may decode tokens that the tree does not have.
        done = (self._begun - 1) * self._num_tokens + min(self._wrote, self._num_tokens)
        self._bar.update(self._task, completed=done, description=description)


@contextmanager
def simulation_bar(num_simulations: int, num_tokens: int) -> Iterator[SimulationBar]:
    """Show a bar on standard error, if that is a terminal."""
    with bars.Progress(
        bars.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as bar:
        yield SimulationBar(bar, num_simulations, num_tokens)
