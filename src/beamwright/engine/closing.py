"""Tokens that are not drawn: how a thought is made to end within its budget.

Where a row's thought has to be over is a position of its path, so what stands there depends on
neither batch nor schedule. Knows positions and logits; no thoughts, no rows, no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from beamwright.kv.streams import sent
from beamwright.units import MOST_CLOSING

_NEVER = 1 << 60
_MOST_IDS = MOST_CLOSING + 16  # a message's, a token a byte at most, and those of an end


@dataclass(frozen=True)
class Closing:
    """How a row's thought ends at the latest, by positions in its path.

    at: where the first of `ids` stands, whatever is drawn. soft: from where on it ends as soon as
    the token `end` has at least the probability `least`.
    """

    at: int
    ids: tuple[int, ...]
    soft: int
    end: int
    least: float


class RowClosings:
    """Those of a batch, in tensors that are never moved: positions [rows], ids [rows, most]."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._numbers = torch.full((3, num_rows), _NEVER, dtype=torch.long, device=device)
        self._ids = torch.full((num_rows, _MOST_IDS), -1, dtype=torch.long, device=device)
        self._least = torch.zeros(num_rows, device=device)
        self.any = False

    def load(self, rows: Sequence[Closing | None]) -> None:
        """Go on with these rows; None: its thought may go on, or it is in none."""
        self.any = any(rows)
        if not self.any:
            return
        none = Closing(_NEVER, (), _NEVER, 0, 1.0)
        known = [row or none for row in rows]
        ids = [[*row.ids, *[-1] * (_MOST_IDS - len(row.ids))] for row in known]
        numbers = [[row.at for row in known], [row.soft for row in known], [r.end for r in known]]
        least = [row.least for row in known]
        for mine, given in ((self._numbers, numbers), (self._ids, ids), (self._least, least)):
            mine.copy_(sent(given, mine.device))

    def picked(self, rows: Tensor) -> RowClosings:
        """Of these rows, each any number of times."""
        made = copy(self)
        made._numbers, made._ids = self._numbers[:, rows], self._ids[rows]
        made._least = self._least[rows]
        return made

    def imposed(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What stands at these positions [rows], with its log-probability [rows].

        logits: [rows, tokens], untempered. tokens, logprobs [rows]: what was drawn there.
        """
        at, soft, end = self._numbers
        place = (positions - at).unsqueeze(1)
        ids = self._ids.gather(1, place.clamp(0, _MOST_IDS - 1)).squeeze(1)
        hard = (place.squeeze(1) >= 0) & (place.squeeze(1) < _MOST_IDS) & (ids >= 0)
        if logits.device.type == "cpu" and not (hard | (positions >= soft)).any():
            return tokens, logprobs  # most of the time, and the rest reads whole rows
        known = logits.float().log_softmax(-1)
        ends = known.gather(1, end.unsqueeze(1)).squeeze(1).exp() >= self._least
        ends &= (positions >= soft) & ~hard
        chosen = torch.where(hard, ids, torch.where(ends, end, tokens))
        found = known.gather(1, chosen.unsqueeze(1)).squeeze(1)
        return chosen, torch.where(hard | ends, found, logprobs)
