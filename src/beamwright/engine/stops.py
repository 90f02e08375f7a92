"""Stop detection on token ids: delimiter, EOS and limits, for all rows at once.

A delimiter is found across token boundaries by a small automaton over bytes: its state is how many
of the delimiter's bytes the text ends with. The token that completes it ends the step, with
whatever text it holds after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from beamwright.sections import StepSettings
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
    """Of each row [rows]: its automaton's state, and tokens left.

    eos: ids [rows, ids] that end its path. delimited: some row ends at a delimiter.
    """

    state: torch.Tensor
    left: torch.Tensor
    eos: torch.Tensor
    delimited: bool = True


_EOS, _LIMIT, _DELIMITER = 1, 2, 4
CODE_STOP_STRING = 8  # set by the host (`stop_strings`)
_MOST_DELIMITERS = 32


class StopWords:
    """What ends a step wherever it began: EOS ids and delimiters, each row's own.

    The tables of all delimiters lie one behind the other, so that a row's delimiter is nothing
    but the state that it begins with. State 0 stays itself: it is that of rows without one.

    token_bytes: of every id; None without a tokenizer, where no delimiter is found.
    num_moves: how often the tables were allocated anew.
    """

    def __init__(
        self,
        eos_ids: frozenset[int],
        token_bytes: Callable[[], Sequence[bytes]] | None,
        device: torch.device,
    ) -> None:
        self._eos, self._token_bytes, self._device = sorted(eos_ids), token_bytes, device
        self.num_moves = 0
        self._tables: dict[str, DelimiterTable] = {}
        self._first: dict[str, int] = {}
        self._next_state = self._hit = torch.empty(0)

    def new_state(self, state: torch.Tensor, left: torch.Tensor) -> StopState:
        """Of rows that have yet to be loaded; the tensors [rows] become part of it."""
        size = (len(state), len(self._eos))
        return StopState(state, left, torch.zeros(size, dtype=torch.long, device=self._device))

    def first_state(self, step: StepSettings) -> int:
        """Where a step's text begins, and its delimiter's matched bytes count from."""
        return 0 if step.step_tokens is not None else self._first.get(step.delimiter, 0)

    def matched(self, step: StepSettings, token_ids: Sequence[int]) -> int:
        """Bytes of the delimiter that a step with these tokens, which do not complete it, ends
        with."""
        if not self.learn([step]):
            return 0
        first = state = self.first_state(step)
        for token in token_ids:
            state = int(self._next_state[state, token])
        return state - first

    def learn(self, steps: Sequence[StepSettings]) -> bool:
        """Have the tables of these settings' delimiters; False if there are none."""
        wanted = {step.delimiter for step in steps if step.step_tokens is None}
        if self._token_bytes is None or not wanted:
            return False
        if not wanted <= self._tables.keys():
            self._make_tables(wanted, self._token_bytes())
        return True

    def load(self, steps: Sequence[StepSettings], state: StopState) -> None:
        """Go on with rows of these settings; who calls it sets their `state` and `left`."""
        state.delimited = self.learn(steps)
        ids = {True: [-1] * len(self._eos), False: self._eos}
        state.eos.copy_(torch.tensor([ids[step.ignore_eos] for step in steps]))

    def observe(self, token_ids: torch.Tensor, state: StopState) -> torch.Tensor:
        """Codes [rows] uint8 of these tokens [rows], 0 where a row goes on; `state` moves on.

        The host reads nothing here, and `state` stays in place, so that a graph can hold it.
        """
        state.left.sub_(1)
        codes = (token_ids.unsqueeze(1) == state.eos).any(1).to(torch.uint8) * _EOS
        codes += (state.left <= 0) * _LIMIT
        if state.delimited:
            codes += self._hit[state.state, token_ids] * _DELIMITER
            state.state.copy_(self._next_state[state.state, token_ids])
        return codes

    def _make_tables(self, wanted: set[str], pieces: Sequence[bytes]) -> None:
        """Have the tables of these delimiters, and of others as far as there are few."""
        kept = self._tables if len(wanted | self._tables.keys()) <= _MOST_DELIMITERS else {}
        tables, host = dict(kept), torch.device("cpu")
        for delimiter in sorted(wanted - kept.keys()):
            known = self._tables.get(delimiter)
            tables[delimiter] = known or DelimiterTable(delimiter.encode(), pieces, host)
        self._tables, self._first, size = tables, {}, 1
        none = torch.zeros(1, len(pieces), dtype=torch.long)
        next_state, hit = [none], [none.bool()]
        for delimiter, table in tables.items():
            self._first[delimiter] = size
            next_state.append(table.next_state + size)
            hit.append(table.hit)
            size += table.hit.shape[0]
        self._next_state = torch.cat(next_state).to(self._device)
        self._hit = torch.cat(hit).to(self._device)
        self.num_moves += 1


def stop_reason(code: int, limit: RowLimit) -> StopReason:
    """What a code of `StopWords` means for a row with this limit.

    A stop string comes first, whose text is cut; then EOS, a limit that ends the path, the
    delimiter, step limits.
    """
    if code & CODE_STOP_STRING:
        return StopReason.STOP_STRING
    if code & _EOS:
        return StopReason.EOS
    if code & _LIMIT and (limit.reason.ends_path or not code & _DELIMITER):
        return limit.reason
    return StopReason.DELIMITER
