"""Stop detection on token ids: delimiter, EOS and limits, for all rows at once.

A delimiter is found across token boundaries by a small automaton over bytes: its state is how many
of the delimiter's bytes the text ends with. The token that completes it ends the step, with
whatever text it holds after it (DESIGN, "step").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamwright.config import StepSettings
from beamwright.tree import Node, StopReason


class DelimiterTable:
    """Per state and token: the next state, and whether the delimiter is completed."""

    def __init__(
        self, delimiter: bytes, token_bytes: Sequence[bytes], device: torch.device
    ) -> None:
        size = len(token_bytes)
        next_state = torch.zeros(len(delimiter), size, dtype=torch.long)
        hit = torch.zeros(len(delimiter), size, dtype=torch.bool)
        wanted = set(delimiter)
        for state in range(len(delimiter)):
            for token, piece in enumerate(token_bytes):
                if not piece:
                    next_state[state, token] = state
                elif wanted & set(piece):
                    after, found = _feed(delimiter, state, piece)
                    next_state[state, token], hit[state, token] = after, found
        self.next_state = next_state.to(device)
        self.hit = hit.to(device)


def _feed(delimiter: bytes, state: int, piece: bytes) -> tuple[int, bool]:
    """State after `piece`, and whether the delimiter was completed inside it."""
    text = delimiter[:state] + piece
    found = delimiter in text
    tail = text[text.rindex(delimiter) + len(delimiter) :] if found else text
    for length in range(min(len(delimiter) - 1, len(tail)), 0, -1):
        if tail.endswith(delimiter[:length]):
            return length, found
    return 0, found


@dataclass(frozen=True)
class RowLimit:
    """The most tokens a row's step may have, and what stops it there."""

    tokens: int
    reason: StopReason


def row_limit(node: Node, settings: StepSettings, context: int) -> RowLimit:
    """The nearest of a node's limits; where two coincide, the one that ends the path."""
    limits = [RowLimit(context - node.start, StopReason.CONTEXT_LIMIT)]
    if settings.max_tokens is not None:
        done = node.start - node.replies_to.end
        limits.append(RowLimit(settings.max_tokens - done, StopReason.PATH_LIMIT))
    if settings.step_tokens is not None:
        limits.append(RowLimit(settings.step_tokens, StopReason.STEP_LENGTH))
    else:
        most = settings.max_step_tokens
        if settings.step_limits is not None:
            most = settings.step_limits[min(len(node.reply()), len(settings.step_limits)) - 1]
        limits.append(RowLimit(most, StopReason.STEP_LIMIT))
    return min(limits, key=lambda limit: limit.tokens)


class StopDetector:
    """Stop reasons of a batch of rows, one token at a time.

    EOS comes first, then a limit that ends the path, then the delimiter, then step limits.
    """

    def __init__(
        self,
        settings: StepSettings,
        eos_ids: frozenset[int],
        table: DelimiterTable | None,
        limits: Sequence[RowLimit],
        num_rows: int,
        device: torch.device,
    ) -> None:
        eos = [] if settings.ignore_eos else sorted(eos_ids)
        self._eos = torch.tensor(eos, dtype=torch.long, device=device)
        self._table = table if settings.step_tokens is None else None
        self._state = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._limits = list(limits)
        spare = [2**62] * (num_rows - len(self._limits))
        tokens = [limit.tokens for limit in self._limits] + spare
        self._most = torch.tensor(tokens, dtype=torch.long, device=device)
        self._rows = list(range(num_rows))
        self._decoded = 0

    def feed(self, token_ids: torch.Tensor) -> dict[int, StopReason]:
        """Stop reasons of the rows (of the present batch) that end with these tokens [rows]."""
        self._decoded += 1
        eos = torch.isin(token_ids, self._eos)
        at_limit = self._most <= self._decoded
        stopped = eos | at_limit
        hit = None
        if self._table is not None:
            hit = self._table.hit[self._state, token_ids]
            self._state = self._table.next_state[self._state, token_ids]
            stopped = stopped | hit
        rows: list[int] = stopped.nonzero().flatten().tolist()
        return {row: self._reason(row, eos, at_limit, hit) for row in rows}

    def _reason(
        self, row: int, eos: torch.Tensor, at_limit: torch.Tensor, hit: torch.Tensor | None
    ) -> StopReason:
        if bool(eos[row]):
            return StopReason.EOS
        delimited = hit is not None and bool(hit[row])
        if bool(at_limit[row]):
            reason = self._limits[self._rows[row]].reason
            if reason.ends_path or not delimited:
                return reason
        return StopReason.DELIMITER

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(list(rows), device=self._state.device)
        self._state, self._most = self._state[index], self._most[index]
        self._rows = [self._rows[row] for row in rows]
