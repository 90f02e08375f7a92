"""Where a row's step ends: limits, texts, the end of a thought.

Stops are the host's, which looks at every token one step late: the device knows nothing of them, so
that a captured step is the same whatever ends its rows. Texts are searched as bytes, across token
boundaries; the token that completes one ends the step, with whatever it holds behind it. What was
drawn beyond is dropped, so that where a step ends depends on its tokens alone.

Where a row's thought has to be over is a position of its path, so what stands there depends on
neither batch nor schedule.
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
from beamwright.kv.streams import sent
from beamwright.models.thinking import ThoughtMarks
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import StepSettings
from beamwright.tree import Node, StopReason
from beamwright.units import MOST_CLOSING

_CUTS: dict[str, tuple[bytes, ...]] = {
    "whole": (),
    "paragraphs": (b"\n\n",),
    "sentences": (b". ", b"? ", b"! ", b".\n", b"?\n", b"!\n"),
    # What thinking models begin another try with (thinkbooster, arXiv 2606.06915).
    "markers": tuple(
        f"{before}{word}".encode()
        for before in ("\n", ". ")
        for word in ("Wait", "Hmm", "But wait", "Alternatively", "Actually", "Let me", "Hold on")
    ),
}


def row_limit(
    node: Node, settings: StepSettings, context: int, *, thought: bool = False
) -> RowLimit:
    """The nearest of a node's limits; where two coincide, the one that ends the path.

    thought: its step is of a thought.
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
    """What ends a step where it stands."""
    steps = settings.thought_steps if thought else "auto"
    if steps == "auto":
        return () if settings.step_tokens is not None else (settings.delimiter.encode(),)
    return _CUTS.get(str(steps), ())


def begins_thought(node: Node, marks: ThoughtMarks | None) -> bool | None:
    """Whether a node's step begins inside a thought; None where its first tokens will say."""
    parent = node.parent
    if marks is None or parent is None:
        return False
    if parent.thinking or _opened(parent, marks):
        return True
    return None if parent is node.replies_to else False


def _opened(node: Node, marks: ThoughtMarks) -> bool:
    return not node.quoted and marks.opened(node.token_ids)


# --- tokens that are not drawn: how a thought is made to end within its budget ----------------

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


# --- stops -----------------------------------------------------------------------------------

_SOFTENS = 0.75  # of a budget


class StopFinder:
    """Why rows end. codec: None without a tokenizer, where nothing but limits ends a step."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._eos = codec.eos_ids if codec is not None else frozenset[int]()
        self._pieces = codec.token_bytes if codec is not None else []
        self._marks = codec.thoughts if codec is not None else None
        self._enders: dict[tuple[bytes, ...], NDArray[np.bool_]] = {}

    def enders(self, row: Row) -> tuple[NDArray[np.bool_] | None, int]:
        """The tokens [vocabulary], and how many more from which on, that `reason` has to be asked
        about.

        EOS, and what holds the last byte of a delimiter: most tokens are none of them, and only
        where thoughts and stop strings are looked for it is asked about each.
        """
        if self._marks is not None or row.decoding.step.stop_strings:
            return None, 1
        most = row.limit.tokens - len(row.tokens)
        if self._codec is None:
            return None, most
        ends = delimiters(row.decoding.step, thought=False)
        if ends not in self._enders:
            last = frozenset(end[-1] for end in ends)
            found = [not last.isdisjoint(piece) for piece in self._pieces]
            found += [False] * (max(self._eos, default=0) + 1 - len(found))
            self._enders[ends] = np.array(found)
            self._enders[ends][[*self._eos]] = True
        return self._enders[ends], most

    def reason(self, row: Row, drawn: Sequence[int]) -> StopReason | None:
        """Why a row ends with the last of these tokens, drawn behind its own; None: it goes on.

        To be asked once about each of its `enders`, in their order, and at its limit. A stop string
        comes first, whose text is cut; then EOS, a limit that ends the path, the end of a thought,
        delimiters, step limits.
        """
        step = row.decoding.step
        turned = None if self._marks is None else self._turn(row, drawn, self._marks)
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

    def closing(self, row: Row) -> Closing | None:
        """How the row's thought has to end; None if nothing asks for that, or it is in none."""
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
        # A start that is drawn cannot be undone.
        drawn = start == reply.end and not _opened(reply, marks)
        least = len(marks.start) if drawn else 0
        at, soft = (start + max(least, math.ceil(share * budget)) for share in (1, _SOFTENS))
        message = self._codec.encode(step.close_message)
        return Closing(at, (*message, *marks.end), soft, marks.end[0], step.soft_close)

    @staticmethod
    def _turn(row: Row, drawn: Sequence[int], marks: ThoughtMarks) -> StopReason | None:
        """Why a row ends where a thought ends, or one begins behind text; None elsewhere."""
        if row.thought is None and (begins := marks.begins([*row.tokens, *drawn])) is not None:
            row.thought = begins
        last = [*row.tokens, *drawn][-len(marks.end) :] if drawn[-1] == marks.end[-1] else ()
        if tuple(last) == marks.end:
            row.thought = True  # also where nobody has seen it begin
            return StopReason.THOUGHT_END
        begins = drawn[-1] == marks.start[-1] and not row.thought
        if begins and marks.opened([*row.tokens, *drawn]):
            return StopReason.DELIMITER
        return None

    def _completes_string(self, row: Row, drawn: Sequence[int]) -> bool:
        """True if its bytes are there, and what is said has it: special tokens have no text, and
        some tokenizers leave out the space that a text begins with."""
        if self._codec is None or (row.thought is not False and not row.node.root.raw):
            return False
        strings = row.decoding.step.stop_strings
        length = max(len(string.encode()) for string in strings) - 1
        above, stripped = _said_above(row.node)
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
        """The last token's, and up to so many bytes before it: of the step, and of those above."""
        steps, before = (drawn[:-1], row.tokens, *(node.token_ids for node in above)), b""
        for token in chain.from_iterable(map(reversed, steps)):
            if len(before) >= length:
                break
            before = self._pieces[token] + before
        return before[max(0, len(before) - length) :] + self._pieces[drawn[-1]]


def _said_above(node: Node) -> tuple[list[Node], bool]:
    """Steps of its reply above it that stop strings end, nearest first: up to a thought. True where
    nothing was said before that one: blanks behind it are no part of an answer."""
    above = node.reply()[-2::-1]
    said = above if node.root.raw else [*takewhile(lambda step: not step.thought, above)]
    before = above[len(said) :]
    return said, bool(before) and all(step.thought for step in before)


def text_stopped(text: str, node: Node, stop_strings: Sequence[str]) -> str:
    """A reply's text up to a stop string, which is looked for in its answer alone."""
    said, stripped = _said_above(node)
    thought = (said[-1] if said else node).parent
    answer = text[0 if thought is None else len(thought.text) :]
    answer = answer.lstrip() if stripped else answer
    return text[: len(text) - len(answer)] + text_before(answer, stop_strings)


def text_before(text: str, stop_strings: Sequence[str]) -> str:
    """A text up to the first of these strings in it; all of it if there is none."""
    starts = [text.find(string) for string in stop_strings]
    return text[: min((start for start in starts if start >= 0), default=len(text))]
