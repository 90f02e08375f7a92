"""Stop conditions of a step: EOS, length limits, delimiters, stop strings, and ends of thoughts.

The host finds stops, one step late; the device does not check any, so a captured step is the same
for all rows. Delimiters and stop strings are searched as bytes, across token boundaries. The token
that completes one of them is the step's last token, even if its text goes on. Tokens sampled after
it are dropped, so where a step ends depends on its tokens alone.

With a thinking budget, forced tokens end a thought at a position that follows from the path. Forced
tokens depend on neither batch nor schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamwright.engine.row import Row, RowLimit
from beamwright.kv.streams import send_to_device
from beamwright.models.thinking import ThoughtMarks
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import StepSettings
from beamwright.tree import Node, StopReason
from beamwright.units import MOST_CLOSING

_CUTS: dict[str, tuple[bytes, ...]] = {
    "whole": (),
    "paragraphs": (b"\n\n",),
    "sentences": (b". ", b"? ", b"! ", b".\n", b"?\n", b"!\n"),
    # Phrases with which thinking models begin another attempt (thinkbooster, arXiv 2606.06915).
    "markers": tuple(
        f"{before}{word}".encode()
        for before in ("\n", ". ")
        for word in ("Wait", "Hmm", "But wait", "Alternatively", "Actually", "Let me", "Hold on")
    ),
}


def row_limit(
    node: Node, settings: StepSettings, context: int, *, thought: bool = False
) -> RowLimit:
    """Return the length limit of a node's step; of equal limits the one that ends the path.

    context: maximum number of tokens of a path.
    thought: True if the step is in a thought.
    """
    nearest = RowLimit(context - node.start, StopReason.CONTEXT_LIMIT)
    if settings.max_tokens is not None:
        left = settings.max_tokens - (node.start - node.replies_to.end)
        if left < nearest.tokens:
            nearest = RowLimit(left, StopReason.PATH_LIMIT)
    steps = settings.thought_steps if thought else "auto"
    fixed = steps if isinstance(steps, int) else settings.step_tokens if steps == "auto" else None
    most, why = fixed, StopReason.STEP_LENGTH
    if most is None and steps != "whole":
        most, why = settings.max_step_tokens, StopReason.STEP_LIMIT
        if settings.step_limits is not None and not thought:
            most = settings.step_limits[min(len(node.reply()), len(settings.step_limits)) - 1]
    return nearest if most is None or nearest.tokens <= most else RowLimit(most, why)


def delimiters(settings: StepSettings, *, thought: bool) -> tuple[bytes, ...]:
    """Return the delimiters that end a step, as bytes. thought: True if it is in a thought."""
    steps = settings.thought_steps if thought else "auto"
    if steps == "auto":
        return () if settings.step_tokens is not None else (settings.delimiter.encode(),)
    return _CUTS.get(str(steps), ())


def begins_in_thought(node: Node, marks: ThoughtMarks | None) -> bool | None:
    """Return True if a node's step begins inside a thought.

    None: the model may open a thought with the step's first tokens.
    """
    parent = node.parent
    if marks is None or parent is None:
        return False
    if parent.thinking or _prompt_opens_thought(parent, marks):
        return True
    return None if parent is node.replies_to else False


def _prompt_opens_thought(node: Node, marks: ThoughtMarks) -> bool:
    return not node.quoted and marks.ends_with_start(node.token_ids)


# --- forced tokens: how a thought is made to end within its budget ----------------------------

_NEVER = 1 << 60  # a position that no path reaches
# Maximum number of forced tokens: a closing message, one per byte, and an end-of-thought mark.
_MOST_IDS = MOST_CLOSING + 16


@dataclass(frozen=True)
class ThoughtClosing:
    """Forced end of a row's thought, when its thinking budget runs out. Positions are in the path.

    at: the position of the first of `ids`, which replace the sampled tokens.
    ids: token ids of the closing message and of the end-of-thought mark.
    soft: the position from which the thought ends as soon as the model is ready to end it.
    end: the first token of the end-of-thought mark.
    least: the probability of `end` at which the thought ends from `soft` on.
    """

    at: int
    ids: tuple[int, ...]
    soft: int
    end: int
    least: float


class ThoughtClosings:
    """The `ThoughtClosing` of every row of a batch, in tensors whose addresses never change.

    Positions are [rows], forced token ids [rows, most].
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._numbers = torch.full((3, num_rows), _NEVER, dtype=torch.long, device=device)
        self._ids = torch.full((num_rows, _MOST_IDS), -1, dtype=torch.long, device=device)
        self._least = torch.zeros(num_rows, device=device)
        self.any = False

    def load(self, rows: Sequence[ThoughtClosing | None]) -> None:
        """Copy the closings of all rows to the device. None: no end is forced on this row."""
        self.any = any(rows)
        if not self.any:
            return
        none = ThoughtClosing(_NEVER, (), _NEVER, 0, 1.0)
        known = [row or none for row in rows]
        ids = [[*row.ids, *[-1] * (_MOST_IDS - len(row.ids))] for row in known]
        numbers = [[row.at for row in known], [row.soft for row in known], [r.end for r in known]]
        least = [row.least for row in known]
        for mine, given in ((self._numbers, numbers), (self._ids, ids), (self._least, least)):
            mine.copy_(send_to_device(given, mine.device))

    def select_rows(self, rows: Tensor) -> ThoughtClosings:
        """Return the closings of the rows with the indices `rows`, which may repeat."""
        made = copy(self)
        made._numbers, made._ids = self._numbers[:, rows], self._ids[rows]
        made._least = self._least[rows]
        return made

    def apply_closings(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Replace sampled tokens by forced ones where a thought must end.

        Return the final tokens [rows] and their log-probabilities [rows].

        logits: [rows, tokens], untempered. positions: [rows].
        tokens, logprobs: [rows], the sampled tokens at these positions.
        """
        at, soft, end = self._numbers
        place = (positions - at).unsqueeze(1)
        ids = self._ids.gather(1, place.clamp(0, _MOST_IDS - 1)).squeeze(1)
        hard = (place.squeeze(1) >= 0) & (place.squeeze(1) < _MOST_IDS) & (ids >= 0)
        if logits.device.type == "cpu" and not (hard | (positions >= soft)).any():
            return tokens, logprobs  # the usual case; the code below reads whole rows of logits
        known = logits.float().log_softmax(-1)
        ends = known.gather(1, end.unsqueeze(1)).squeeze(1).exp() >= self._least
        ends &= (positions >= soft) & ~hard
        chosen = torch.where(hard, ids, torch.where(ends, end, tokens))
        chosen_logprobs = known.gather(1, chosen.unsqueeze(1)).squeeze(1)
        return chosen, torch.where(hard | ends, chosen_logprobs, logprobs)


# --- stops -----------------------------------------------------------------------------------

# Share of the thinking budget from which a thought ends as soon as the model is ready to end it.
_SOFTENS = 0.75


class StopFinder:
    """Finder of stop reasons in sampled tokens.

    codec: the tokenizer; if None, only length limits end a step.
    """

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._eos = codec.eos_ids if codec is not None else frozenset[int]()
        self._pieces = codec.token_bytes if codec is not None else []
        self._marks = codec.thoughts if codec is not None else None
        self._possible_stops: dict[tuple[bytes, ...], NDArray[np.bool_]] = {}

    def possible_stops(self, row: Row) -> tuple[NDArray[np.bool_] | None, int]:
        """Return which tokens can stop a row, so that `find_reason` is called only for these.

        The first value is a mask [vocabulary]: EOS tokens, and tokens with the last byte of a
        delimiter. It is None if every token must be checked, because the row may have thoughts or
        stop strings. The second value is the number of further tokens up to the length limit, from
        which on every token must be checked.
        """
        if self._marks is not None or row.decoding.step.stop_strings:
            return None, 1
        most = row.limit.tokens - len(row.tokens)
        if self._codec is None:
            return None, most
        ends = delimiters(row.decoding.step, thought=False)
        if ends not in self._possible_stops:
            last = frozenset(end[-1] for end in ends)
            is_ender = [not last.isdisjoint(piece) for piece in self._pieces]
            is_ender += [False] * (max(self._eos, default=0) + 1 - len(is_ender))
            self._possible_stops[ends] = np.array(is_ender)
            self._possible_stops[ends][[*self._eos]] = True
        return self._possible_stops[ends], most

    def find_reason(self, row: Row, drawn: Sequence[int]) -> StopReason | None:
        """Return why a row stops at the last token of `drawn`; None if it goes on.

        Call this once for each possible stop, in order, and at the row's limit. The call may set
        `row.thought`. The first reason in this order counts: a stop string, whose text is cut off;
        EOS; a limit that ends the path; the end of a thought; a delimiter; a limit of the step.

        drawn: tokens sampled after `row.tokens`.
        """
        step = row.decoding.step
        turned = (
            None if self._marks is None else self._find_thought_boundary(row, drawn, self._marks)
        )
        limit = row.limit
        at_limit = len(row.tokens) + len(drawn) >= limit.tokens
        ends = () if self._codec is None else delimiters(step, thought=bool(row.thought))
        text = self._text(row, drawn, max(map(len, ends)) - 1) if ends else b""
        delimited = any(end in text for end in ends)
        if step.stop_strings and self._completes_string(row, drawn):
            return StopReason.STOP_STRING
        if drawn[-1] in self._eos and not step.ignore_eos:
            return StopReason.EOS
        if at_limit and (limit.reason.ends_path or not (delimited or turned)):
            return limit.reason
        return turned or (StopReason.DELIMITER if delimited else None)

    def find_closing(self, row: Row) -> ThoughtClosing | None:
        """Return where and by which tokens a row's thought must end, from its budget in tokens.

        None without a budget, or if the row is outside a thought.
        """
        step, marks = row.decoding.step, self._marks
        if marks is None or not row.thought or step.thinking in ("auto", "on"):
            return None
        assert self._codec is not None
        budget = 0 if step.thinking == "off" else int(step.thinking)
        above, reply = row.node.reply()[:-1], row.node.replies_to
        thought = [*takewhile(lambda each: each.thinking, reversed(above))]
        start = row.node.start - sum(len(each.token_ids) for each in thought)
        earlier = [each for each in above if each.thought and each not in thought]
        budget -= sum(len(each.token_ids) for each in earlier)
        # A start-of-thought mark that the model sampled cannot be undone: the end comes after it.
        drawn = start == reply.end and not _prompt_opens_thought(reply, marks)
        least = len(marks.start) if drawn else 0
        at, soft = (start + max(least, math.ceil(share * budget)) for share in (1, _SOFTENS))
        message = self._codec.encode(step.close_message)
        return ThoughtClosing(at, (*message, *marks.end), soft, marks.end[0], step.soft_close)

    @staticmethod
    def _find_thought_boundary(
        row: Row, drawn: Sequence[int], marks: ThoughtMarks
    ) -> StopReason | None:
        """Return the stop reason at a thought's end, or at its start after text; None elsewhere.

        Also set `row.thought`.
        """
        if (
            row.thought is None
            and (begins := marks.begins_with_start([*row.tokens, *drawn])) is not None
        ):
            row.thought = begins
        last = [*row.tokens, *drawn][-len(marks.end) :] if drawn[-1] == marks.end[-1] else ()
        if tuple(last) == marks.end:
            row.thought = True  # even if its start mark was never seen
            return StopReason.THOUGHT_END
        begins = drawn[-1] == marks.start[-1] and not row.thought
        if begins and marks.ends_with_start([*row.tokens, *drawn]):
            return StopReason.DELIMITER
        return None

    def _completes_string(self, row: Row, drawn: Sequence[int]) -> bool:
        """Return True if the last token completes a stop string.

        The string must occur in the bytes and in the decoded text. The bytes alone are not enough:
        special tokens have no text, and some tokenizers drop the space at the start of a text.
        """
        if self._codec is None or (row.thought is not False and not row.node.root.raw):
            return False
        strings = row.decoding.step.stop_strings
        length = max(len(string.encode()) for string in strings) - 1
        above, stripped = _answer_steps_above(row.node)
        text = self._text(row, drawn, length, above)
        if not any(string.encode() in text for string in strings):
            return False
        ids = [token for step in reversed(above) for token in step.token_ids]
        said = self._codec.decode([*ids, *row.tokens, *drawn])
        said = said.lstrip() if stripped else said
        return any(string in said for string in strings)

    def _text(
        self, row: Row, drawn: Sequence[int], length: int, above: Sequence[Node] = ()
    ) -> bytes:
        """Return the bytes of the last token and up to `length` bytes before it.

        The earlier bytes come from the step, then from the steps `above`, nearest first.
        """
        steps, before = (drawn[:-1], row.tokens, *(node.token_ids for node in above)), b""
        for token in chain.from_iterable(map(reversed, steps)):
            if len(before) >= length:
                break
            before = self._pieces[token] + before
        return before[max(0, len(before) - length) :] + self._pieces[drawn[-1]]


def _answer_steps_above(node: Node) -> tuple[list[Node], bool]:
    """Return the earlier steps of a node's reply that belong to its answer, nearest first.

    Stop strings count only in these steps, which follow the last thought. The second value is True
    if only a thought precedes them; whitespace after it then does not belong to the answer.
    """
    above = node.reply()[-2::-1]
    said = above if node.root.raw else [*takewhile(lambda step: not step.thought, above)]
    before = above[len(said) :]
    return said, bool(before) and all(step.thought for step in before)


def cut_at_stop_string(text: str, node: Node, stop_strings: Sequence[str]) -> str:
    """Return a reply's text up to the first stop string. Thoughts may contain stop strings."""
    said, stripped = _answer_steps_above(node)
    thought = (said[-1] if said else node).parent
    answer = text[0 if thought is None else len(thought.text) :]
    answer = answer.lstrip() if stripped else answer
    return text[: len(text) - len(answer)] + cut_before(answer, stop_strings)


def cut_before(text: str, stop_strings: Sequence[str]) -> str:
    """Return the text before the first of `stop_strings`; all of the text if none occurs."""
    starts = [text.find(string) for string in stop_strings]
    return text[: min((start for start in starts if start >= 0), default=len(text))]
