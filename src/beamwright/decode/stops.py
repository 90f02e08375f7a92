"""Stop detection on token ids: delimiter, EOS and limits, for all rows at once.

A delimiter is found across token boundaries by a small automaton over bytes: its state is how many
of the delimiter's bytes the text ends with. The token that completes it ends the step, with
whatever text it holds after it.
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


@dataclass
class StopState:
    """Of each row [rows]: bytes of the delimiter that its text ends with, and tokens left."""

    matched: torch.Tensor
    left: torch.Tensor


_EOS, _LIMIT, _DELIMITER = 1, 2, 4


class StopWords:
    """What ends a step wherever it began: EOS ids and the delimiter. On the device only."""

    def __init__(
        self,
        settings: StepSettings,
        eos_ids: frozenset[int],
        table: DelimiterTable | None,
        device: torch.device,
    ) -> None:
        eos = [] if settings.ignore_eos else sorted(eos_ids)
        self._eos = torch.tensor(eos, dtype=torch.long, device=device)
        self._table = table if settings.step_tokens is None else None

    def observe(self, token_ids: torch.Tensor, state: StopState) -> torch.Tensor:
        """Codes [rows] uint8 of these tokens [rows], 0 where a row goes on; `state` moves on.

        The host reads nothing here, and `state` stays in place, so that a graph can hold it.
        """
        state.left.sub_(1)
        codes = (token_ids.unsqueeze(1) == self._eos).any(1).to(torch.uint8) * _EOS
        codes += (state.left <= 0) * _LIMIT
        if self._table is not None:
            codes += self._table.hit[state.matched, token_ids] * _DELIMITER
            state.matched.copy_(self._table.next_state[state.matched, token_ids])
        return codes


def stop_reason(code: int, limit: RowLimit) -> StopReason:
    """What a code of `StopWords` means for a row with this limit.

    EOS comes first, then a limit that ends the path, then the delimiter, then step limits.
    """
    if code & _EOS:
        return StopReason.EOS
    if code & _LIMIT and (limit.reason.ends_path or not code & _DELIMITER):
        return limit.reason
    return StopReason.DELIMITER
