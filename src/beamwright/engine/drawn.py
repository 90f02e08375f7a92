"""What the steps of an iteration drew, as the host learns of it: arrays of all rows at once.

Only rows with an event are looked at one by one; which rows those are is one comparison a step.
Knows rows and where they end; no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beamwright.engine.buffers import StepBuffers
from beamwright.engine.endings import StopFinder
from beamwright.engine.graphs import Numbers, Replay
from beamwright.engine.row import Row, awaited
from beamwright.tree import TopTokens


class Found:
    """What an iteration's steps have found, on its way to the host but for hidden states."""

    def __init__(self, buffers: StepBuffers, replay: Replay, num_seen: int, num_steps: int) -> None:
        self.num_steps, self._names = num_steps, buffers.names
        self.hidden = buffers.found("hidden", num_steps)
        self.tokens = replay.fetch(buffers.found("tokens", num_steps, num_seen))
        self._numbers = replay.fetch(buffers.found("numbers", num_steps))
        asked = ("top_ids", "top_logprobs") if buffers.asks else ()
        self._top = [replay.fetch(buffers.found(name, num_steps)) for name in asked]

    def columns(self) -> dict[str, list[list[float]]]:
        """Numbers by name, of each row those of its steps."""
        numbers = self._numbers().transpose(1, 2, 0).tolist()
        return dict(zip(self._names, numbers, strict=True))

    def top(self, place: int, used: int, count: int) -> list[TopTokens]:
        """Of a row's first tokens so many that were likeliest."""
        if not count or not self._top:
            return []
        pairs = (each()[:used, place, :count].tolist() for each in self._top)
        return [tuple(zip(*pair, strict=True)) for pair in zip(*pairs, strict=True)]


class Drawn:
    """What the steps of an iteration drew, as far as the host has looked.

    rows: by place; None pads the batch. seen: tokens [rows] of each step. used: of each place that
    has stopped, its tokens up to there; none if it had before. num_awaited: rows that count
    (`awaited`), and num_stopped of them have.
    """

    def __init__(self, rows: Sequence[Row | None], stops: StopFinder) -> None:
        self.rows, self._stops, self.seen = rows, stops, list[Numbers]()
        self.used = [0] * len(rows)
        self._ends: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] | None = None
        counting = awaited([row for row in rows if row is not None])
        self._awaited, self.num_awaited = frozenset(counting), len(counting)
        self.num_stopped = sum([row.stop is not None for row in counting])

    def _begin(self) -> None:
        """Which rows are open, when each is asked about whatever it draws, and which rows draw
        tokens of the same set that it is asked about. Not before the first step is launched."""
        if self._ends is not None:
            return
        self._open, self._most = np.zeros(len(self.rows), bool), np.zeros(len(self.rows), int)
        ends = dict[int, tuple[NDArray[np.bool_], list[int]]]()
        for place, row in enumerate(self.rows):
            if row is not None and row.stop is None:
                table, self._most[place] = self._stops.enders(row)
                self._open[place] = True
                if table is not None:
                    ends.setdefault(id(table), (table, []))[1].append(place)
        self._ends = [(table, np.array(places)) for table, places in ends.values()]

    def look(self, tokens: Numbers) -> list[Row]:
        """The tokens of one more step, by place; returns awaited rows that stop with it."""
        self._begin()
        self.seen.append(tokens)
        asked = self._most <= len(self.seen)
        for table, places in self._ends or ():
            asked[places] |= table[tokens[places]]
        stopped = list[Row]()
        for place in (asked & self._open).nonzero()[0].tolist():
            row = self.rows[place]
            assert row is not None
            row.stop = self._stops.reason(row, [int(step[place]) for step in self.seen])
            if row.stop is not None:
                self._open[place], self.used[place] = False, len(self.seen)
                stopped += [row] if row in self._awaited else []
        self.num_stopped += len(stopped)
        return stopped

    def go_on(self, num_steps: int) -> bool:
        """True if most rows have more to draw than so many tokens, whatever these are."""
        self._begin()
        return bool(4 * (self._open & (self._most > num_steps)).sum() > 3 * self.num_awaited)
