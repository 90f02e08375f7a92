"""What decode steps read and write beside KV, and what they drew as the host learns of it.

Only rows with an event are looked at one by one; which rows those are is one comparison a step.
Knows rows and where they end; no model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from beamwright.engine.capacity import ITERATION_TOKENS
from beamwright.engine.endings import StopFinder
from beamwright.engine.noise import stack_keys
from beamwright.engine.row import Row, awaited
from beamwright.engine.sampling import RowSampling, Ways
from beamwright.kv.streams import sent
from beamwright.models.packed import Numbers, Replay
from beamwright.tree import TopTokens


class StepBuffers:
    """Everything that a step of `num_rows` rows reads and writes beside KV; never moved.

    hidden: final hidden states [rows, hidden] for their shape, type and device.
    num_likeliest: of how many tokens beside the drawn one a step can say how likely they are.
    results: what steps found, by name [step, row, ...], of two iterations in turn: while the first
    step of one is under way, the host reads what those of the other have found. numbers: those of
    them that are a number per row [step, name, row]. index [1]: the next step's place.
    """

    def __init__(
        self, num_rows: int, stats: Collection[str], hidden: torch.Tensor, num_likeliest: int
    ) -> None:
        device, num_steps = hidden.device, 2 * ITERATION_TOKENS

        def results(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(num_steps, *shape, dtype=dtype, device=device)

        self._arrangement = -1
        self.keys = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self.sampling = RowSampling(num_rows, device)
        self._moving = torch.zeros(2, num_rows, dtype=torch.long, device=device)
        self.tokens, self.positions = self._moving
        self.index, self._first = torch.zeros(1, dtype=torch.long, device=device), 0
        self.names = "logprobs", *stats
        self._numbers = results(len(self.names), num_rows)
        self.results = {
            "tokens": results(num_rows, dtype=torch.long),
            "hidden": results(num_rows, *hidden.shape[1:], dtype=hidden.dtype),
            **dict(zip(self.names, self._numbers.unbind(1), strict=True)),
            "top_ids": results(num_rows, num_likeliest, dtype=torch.long),
            "top_logprobs": results(num_rows, num_likeliest),
        }
        self.asks, self.unread = False, frozenset[int]()

    def load(self, rows: Sequence[Row | None], arrangement: int, stops: StopFinder) -> None:
        """Begin an iteration with these rows; None pads the batch.

        arrangement: another number wherever others have joined than before.
        """
        device = self.keys.device
        first = next(row for row in rows if row is not None)
        real = [row or first for row in rows]
        if arrangement != self._arrangement:  # what stays the same as long as a row runs
            settings = [row.decoding.sampling for row in real]
            self.keys.copy_(stack_keys([row.key for row in real], device))
            greedy = [row.node.greedy for row in real]
            self.sampling.load(settings, greedy, [*map(stops.closing, real)])
            self.asks = any([each.top_logprobs for each in settings])
            self._arrangement = arrangement
        self.unread = frozenset([place for place, row in enumerate(rows) if row is None])
        tokens = [row.tokens[-1] if row.tokens else 0 for row in real]
        positions = [row.node.start + row.forwarded for row in real]
        self._moving.copy_(sent([tokens, positions], device))
        self.turn()

    def turn(self) -> None:
        """What steps find from here on is of another iteration."""
        self._first = ITERATION_TOKENS - self._first
        self.index.fill_(self._first)

    def found(self, name: str, until: int, since: int = 0) -> torch.Tensor:
        """What the first steps of the present iteration have found [step, row, ...]."""
        held = self._numbers if name == "numbers" else self.results[name]
        return held[self._first + since : self._first + until]

    @property
    def ways(self) -> tuple[Ways, bool]:
        """What a step computes at all, and a captured one always will."""
        return self.sampling.ways, self.asks

    def keep(self, **values: torch.Tensor) -> None:
        """What this step found, by name [rows, ...]."""
        for name, found in values.items():
            self.results[name].index_copy_(0, self.index, found.unsqueeze(0))


class Drawn:
    """What the steps of an iteration drew, as far as the host has looked.

    rows: by place; None pads the batch. seen: tokens [rows] of each step. used: of each place that
    has stopped, its tokens up to there; none if it had before. num_awaited: rows that count
    (`awaited`), and num_stopped of them have. hidden: of `num_steps` that have been fetched.
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
        for table, known in self._ends or ():
            asked[known] |= table[tokens[known]]
        stopped = list[Row]()
        places = (asked & self._open).nonzero()[0]
        drawn = np.stack(self.seen, 1)[places].tolist() if len(places) else ()
        for place, ids in zip(places.tolist(), drawn, strict=True):
            row = self.rows[place]
            assert row is not None
            row.stop = self._stops.reason(row, ids)
            if row.stop is not None:
                self._open[place], self.used[place] = False, len(self.seen)
                stopped += [row] if row in self._awaited else []
        self.num_stopped += len(stopped)
        return stopped

    def go_on(self, num_steps: int) -> bool:
        """True if most rows have more to draw than so many tokens, whatever these are."""
        self._begin()
        return bool(4 * (self._open & (self._most > num_steps)).sum() > 3 * self.num_awaited)

    # --- what else was found -----------------------------------------------------------------

    def fetch(self, buffers: StepBuffers, replay: Replay, num_steps: int) -> None:
        """Have all that so many steps found on its way to the host, but for hidden states."""
        self.num_steps, self._names = num_steps, buffers.names
        self.hidden = buffers.found("hidden", num_steps)
        self._tokens = replay.fetch(buffers.found("tokens", num_steps, len(self.seen)))
        self._numbers = replay.fetch(buffers.found("numbers", num_steps))
        asked = ("top_ids", "top_logprobs") if buffers.asks else ()
        self._top = [replay.fetch(buffers.found(name, num_steps)) for name in asked]

    def tokens(self) -> list[list[int]]:
        """Of each row, all steps looked at."""
        for step in self._tokens():
            self.look(step)
        tokens: list[list[int]] = np.stack(self.seen, 1).tolist()
        return tokens

    def columns(self) -> list[dict[str, list[float]]]:
        """Of each row the numbers of its steps, by name."""
        numbers = self._numbers().transpose(2, 1, 0).tolist()
        return [dict(zip(self._names, each, strict=True)) for each in numbers]

    def top(self, place: int, used: int, count: int) -> list[TopTokens]:
        """Of a row's first tokens so many that were likeliest."""
        if not count or not self._top:
            return []
        pairs = (each()[:used, place, :count].tolist() for each in self._top)
        return [tuple(zip(*pair, strict=True)) for pair in zip(*pairs, strict=True)]
