"""Device buffers of a decode pass (tokens, positions, results), and the host's copy of the results.

The host checks stop conditions only for rows whose newest token can be a stop. One comparison per
pass finds these rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from beamwright.engine.capacity import ITERATION_TOKENS
from beamwright.engine.endings import StopFinder
from beamwright.engine.noise import stack_keys
from beamwright.engine.row import Row, filter_open_rows
from beamwright.engine.sampling import RowSampling, SamplingFlags
from beamwright.kv.streams import send_to_device
from beamwright.models.prefill_passes import Numbers, Replay
from beamwright.tree import TopTokens


class PassBuffers:
    """Tensors at fixed addresses that a pass of `num_rows` rows reads and writes, besides KV.

    stats: names of the token statistics to store.
    hidden: example of final hidden states [rows, hidden], for shape, dtype and device.
    num_likeliest: number of most likely tokens that a pass can report next to the sampled one.
    """

    def __init__(
        self, num_rows: int, stats: Collection[str], hidden: torch.Tensor, num_likeliest: int
    ) -> None:
        device, num_passes = hidden.device, 2 * ITERATION_TOKENS

        def results(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(num_passes, *shape, dtype=dtype, device=device)

        self._arrangement = -1
        self.keys = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self.sampling = RowSampling(num_rows, device)
        self._moving = torch.zeros(2, num_rows, dtype=torch.long, device=device)
        self.tokens, self.positions = self._moving
        # index [1]: where the next pass writes its results. _first: where the iteration's first
        # pass writes. Iterations use the two halves of the buffers in turn, so that the host can
        # read one half while the next iteration's first pass already writes to the other.
        self.index, self._first = torch.zeros(1, dtype=torch.long, device=device), 0
        self.names = "logprobs", *stats
        self._numbers = results(len(self.names), num_rows)  # [pass, name, row]
        # Results of passes by name [pass, row, ...].
        self.results = {
            "tokens": results(num_rows, dtype=torch.long),
            "hidden": results(num_rows, *hidden.shape[1:], dtype=hidden.dtype),
            **dict(zip(self.names, self._numbers.unbind(1), strict=True)),
            "top_ids": results(num_rows, num_likeliest, dtype=torch.long),
            "top_logprobs": results(num_rows, num_likeliest),
        }
        self.wants_top, self.unread = False, frozenset[int]()

    def load(self, rows: Sequence[Row | None], arrangement: int, stops: StopFinder) -> None:
        """Copy tokens, positions and settings of all rows to the device, for an iteration.

        rows: None is a padding row.
        arrangement: a number that changes whenever the rows or their settings change; settings are
            copied only then.
        stops: finds the forced ends of thoughts.
        """
        device = self.keys.device
        first = next(row for row in rows if row is not None)
        real = [row or first for row in rows]
        if arrangement != self._arrangement:  # values that do not change while a row runs
            settings = [row.decoding.sampling for row in real]
            self.keys.copy_(stack_keys([row.key for row in real], device))
            greedy = [row.node.greedy for row in real]
            self.sampling.load(settings, greedy, [*map(stops.find_closing, real)])
            self.wants_top = any([each.top_logprobs for each in settings])
            self._arrangement = arrangement
        self.unread = frozenset([place for place, row in enumerate(rows) if row is None])
        tokens = [row.tokens[-1] if row.tokens else 0 for row in real]
        positions = [row.node.start + row.forwarded for row in real]
        self._moving.copy_(send_to_device([tokens, positions], device))
        self.switch_half()

    def switch_half(self) -> None:
        """Make the following passes write to the other half of the result buffers."""
        self._first = ITERATION_TOKENS - self._first
        self.index.fill_(self._first)

    def read_results(self, name: str, until: int, since: int = 0) -> torch.Tensor:
        """Return results of the iteration's passes from `since` to `until` [pass, row, ...].

        name: a result's name, or "numbers" for all results with one number per row [pass, name,
            row].
        """
        held = self._numbers if name == "numbers" else self.results[name]
        return held[self._first + since : self._first + until]

    @property
    def pass_flags(self) -> tuple[SamplingFlags, bool]:
        """Optional parts of a pass that these rows need; part of the key of a captured pass."""
        return self.sampling.flags, self.wants_top

    def keep_results(self, **values: torch.Tensor) -> None:
        """Keep results of the current pass, by name [rows, ...]."""
        for name, result in values.items():
            self.results[name].index_copy_(0, self.index, result.unsqueeze(0))


class IterationResults:
    """Tokens and other results of an iteration, as far as the host has read them.

    rows: the rows by place in the batch; None is a padding row.
    seen: for each pass that was read, the tokens [rows].
    used: for each place, the number of tokens up to the row's stop; 0 if the row had stopped
        before, or has not stopped.
    num_awaited, num_stopped: number of open rows, and how many of them have stopped.
    hidden: final hidden states [pass, row, hidden] of the `num_passes` passes that were fetched.
    """

    def __init__(self, rows: Sequence[Row | None], stops: StopFinder) -> None:
        self.rows, self._stops, self.seen = rows, stops, list[Numbers]()
        self.used = [0] * len(rows)
        self._ends: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] | None = None
        counting = filter_open_rows([row for row in rows if row is not None])
        self._awaited, self.num_awaited = frozenset(counting), len(counting)
        self.num_stopped = sum([row.stop is not None for row in counting])

    def _find_possible_stops(self) -> None:
        """Look up, for each row, which token ids can stop it, and how many tokens its limit allows.

        Called after the first pass's launch, so that the device does not wait for the host.
        """
        if self._ends is not None:
            return
        self._open, self._most = np.zeros(len(self.rows), bool), np.zeros(len(self.rows), int)
        ends = dict[int, tuple[NDArray[np.bool_], list[int]]]()
        for place, row in enumerate(self.rows):
            if row is not None and row.stop is None:
                table, self._most[place] = self._stops.possible_stops(row)
                self._open[place] = True
                if table is not None:
                    ends.setdefault(id(table), (table, []))[1].append(place)
        self._ends = [(table, np.array(places)) for table, places in ends.values()]

    def read_pass(self, tokens: Numbers) -> list[Row]:
        """Read the tokens [rows] of one more pass; return the open rows that stop with it."""
        self._find_possible_stops()
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
            row.stop = self._stops.find_reason(row, ids)
            if row.stop is not None:
                self._open[place], self.used[place] = False, len(self.seen)
                stopped += [row] if row in self._awaited else []
        self.num_stopped += len(stopped)
        return stopped

    def most_continue(self, num_tokens: int) -> bool:
        """Return True if over 3/4 of the open rows surely need more than `num_tokens` tokens."""
        self._find_possible_stops()
        return bool(4 * (self._open & (self._most > num_tokens)).sum() > 3 * self.num_awaited)

    # --- all results of an iteration ---------------------------------------------------------

    def fetch(self, buffers: PassBuffers, replay: Replay, num_passes: int) -> None:
        """Start copying the results of `num_passes` passes to the host, except hidden states."""
        self.num_passes, self._names = num_passes, buffers.names
        self.hidden = buffers.read_results("hidden", num_passes)
        self._tokens = replay.fetch(buffers.read_results("tokens", num_passes, len(self.seen)))
        self._numbers = replay.fetch(buffers.read_results("numbers", num_passes))
        asked = ("top_ids", "top_logprobs") if buffers.wants_top else ()
        self._top = [replay.fetch(buffers.read_results(name, num_passes)) for name in asked]

    def tokens(self) -> list[list[int]]:
        """Wait for all passes, and return the tokens of each row, one per pass."""
        for tokens_of_pass in self._tokens():
            self.read_pass(tokens_of_pass)
        tokens: list[list[int]] = np.stack(self.seen, 1).tolist()
        return tokens

    def numbers_by_name(self) -> list[dict[str, list[float]]]:
        """Return, for each row, its log-probabilities and statistics by name, one per pass."""
        numbers = self._numbers().transpose(2, 1, 0).tolist()
        return [dict(zip(self._names, each, strict=True)) for each in numbers]

    def top(self, place: int, used: int, count: int) -> list[TopTokens]:
        """Return the `count` most likely tokens at each of a row's first `used` tokens."""
        if not count or not self._top:
            return []
        pairs = (each()[:used, place, :count].tolist() for each in self._top)
        return [tuple(zip(*pair, strict=True)) for pair in zip(*pairs, strict=True)]
