"""The rows of a group while they are decoded: tokens, random streams, who has stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from beamwright.errors import NotFiniteError
from beamwright.kv import Segment
from beamwright.models.decoder import padded_rows
from beamwright.progress import Progress
from beamwright.runtime.sampling import lineage_key, stack_keys
from beamwright.tree import Node, StopReason

_COMPACT_BELOW = 0.75


@dataclass
class Row:
    """A beam's step so far. The last token of `tokens` has no KV yet.

    logprobs, stats: one value per token, as in `Node`.
    """

    node: Node
    segment: Segment
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stats: dict[str, list[float]] = field(default_factory=dict)
    stop: StopReason | None = None

    def restart(self) -> None:
        """Forget the step so far; what was decoded is lost."""
        self.node.usage["overrun"] += len(self.tokens)
        self.tokens, self.logprobs, self.stats = [], [], {}


class Batch:
    """The rows of the present batch; padding repeats the first row and is never active.

    All rows have decoded equally many tokens: none, or what they had when they were parked.
    """

    def __init__(
        self,
        rows: list[Row],
        num_rows: int,
        seed: int,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._progress = progress
        progress.doing(f"round {rows[0].node.round}: decoding {len(rows)} beams")
        padding = num_rows - len(rows)
        self.rows = [*rows, *([rows[0]] * padding)]
        self.active = [True] * len(rows) + [False] * padding
        self._is_padding = [False] * len(rows) + [True] * padding
        keys = [lineage_key(seed, row.node.lineage) for row in self.rows]
        self.keys = stack_keys(keys, device)
        greedy = [row.node.greedy for row in self.rows]
        self.greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        starts = [row.node.start + max(0, len(row.tokens) - 1) for row in self.rows]
        self.positions = torch.tensor(starts, device=device)

    def token(self, index: int) -> torch.Tensor:
        """The token with this index in every row's step [rows]."""
        tokens = [row.tokens[index] for row in self.rows]
        return torch.tensor(tokens, device=self.positions.device)

    def append(
        self, tokens: list[int], logprobs: list[float], stats: Mapping[str, Sequence[float]]
    ) -> None:
        """Add what was drawn to the rows that have not stopped.

        stats: by name, a value per row of the batch.

        Raises:
            NotFiniteError: if a row's logits were no distribution; its token means nothing then.
        """
        active = self.active_rows()
        self._progress.wrote(len(active))
        for index in active:
            row = self.rows[index]
            if not math.isfinite(logprobs[index]):
                raise _no_distribution(row)
            row.tokens.append(tokens[index])
            row.logprobs.append(logprobs[index])
            for name, values in stats.items():
                row.stats.setdefault(name, []).append(values[index])

    def stop(self, stopped: dict[int, StopReason]) -> None:
        """These rows' steps are complete."""
        for index, reason in stopped.items():
            self.rows[index].stop = reason
            self.active[index] = False

    def park(self, indices: list[int]) -> None:
        """These rows go on later."""
        for index in indices:
            self.active[index] = False
            self._is_padding[index] = True  # it decodes nothing that is lost

    def active_rows(self) -> list[int]:
        """Rows that go on."""
        return [index for index, active in enumerate(self.active) if active]

    def count_overrun(self) -> None:
        """Real rows that have stopped and are still in the batch decode a token for nothing."""
        for row, active, padding in zip(self.rows, self.active, self._is_padding, strict=True):
            if not active and not padding:
                row.node.usage["overrun"] += 1

    def keep_rows(self, kept: list[int]) -> None:
        """Go on with these rows only, in this order."""
        self.rows = [self.rows[index] for index in kept]
        self.active = [self.active[index] for index in kept]
        self._is_padding = [self._is_padding[index] for index in kept]
        index = torch.tensor(kept, device=self.keys.device)
        self.keys, self.positions = self.keys[index], self.positions[index]
        self.greedy = self.greedy[index] if self.greedy is not None else None


def _no_distribution(row: Row) -> NotFiniteError:
    place = f"problem {row.node.problem_id}, step {row.node.depth}, token {len(row.tokens) + 1}"
    return NotFiniteError(
        f"the generator's logits are NaN or infinite: {place} "
        "(a damaged checkpoint, or an overflow: try another --dtype)"
    )


def worth_compacting(num_active: int, num_rows: int) -> bool:
    """True if so many rows have stopped that a smaller batch pays for its making."""
    return padded_rows(num_active) <= _COMPACT_BELOW * num_rows
