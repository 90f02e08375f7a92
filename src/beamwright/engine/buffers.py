"""StepBuffers: what a decode step reads and writes beside KV, at addresses that never change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from beamwright.engine.capacity import ITERATION_TOKENS
from beamwright.engine.closing import Closing
from beamwright.engine.noise import stack_keys
from beamwright.engine.row import Row
from beamwright.engine.sampling import RowSampling, Ways
from beamwright.kv.streams import sent


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

    def load(
        self, rows: Sequence[Row | None], arrangement: int, closing: Callable[[Row], Closing | None]
    ) -> None:
        """Begin an iteration with these rows; None pads the batch.

        arrangement: another number wherever others have joined than before. closing: see
        `StopFinder`.
        """
        device = self.keys.device
        first = next(row for row in rows if row is not None)
        real = [row or first for row in rows]
        if arrangement != self._arrangement:  # what stays the same as long as a row runs
            settings = [row.decoding.sampling for row in real]
            self.keys.copy_(stack_keys([row.key for row in real], device))
            greedy = [row.node.greedy for row in real]
            self.sampling.load(settings, greedy, [*map(closing, real)])
            self.asks = any(each.top_logprobs for each in settings)
            self._arrangement = arrangement
        self.unread = frozenset(place for place, row in enumerate(rows) if row is None)
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
