"""Thoughts: which token ids begin and end what a model writes before it answers.

A row of `thinking.toml` for each way of marking them. A tokenizer that has a row's tokens writes
thoughts so: the ids are looked for and never the text, which a model may spell out in other tokens,
or quote. Knows tokenizers' text and ids; no rows, no settings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from beamwright.io import read_beside


class ThoughtFamily(NamedTuple):
    """How a family marks its thoughts. tokens: of the marks, those that a vocabulary must have; the
    marks themselves where none is named. headers: what else of its replies is no text.
    """

    name: str
    start: str
    end: str
    tokens: Sequence[str] = ()
    headers: Sequence[str] = ()


FAMILIES = tuple(ThoughtFamily(**row) for row in read_beside(__file__)["families"])


# What chat templates read to let a model think, or not to.
_SWITCHES = ("enable_thinking", "thinking")


def template_switch(names: Collection[str], thinking: str | int) -> dict[str, Any]:
    """Arguments of a chat template that reads these names, for `--thinking`."""
    given: dict[str, Any] = {name: thinking != "off" for name in _SWITCHES if name in names}
    if "reasoning_effort" in names and thinking == "off":
        given["reasoning_effort"] = "low"  # gpt-oss cannot leave it
    return given


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of one tokenizer, as token ids.

    start, end: one token or more.
    hidden: these and other sequences that are no text, the longest first. blank: tokens of space.
    """

    family: ThoughtFamily
    start: tuple[int, ...]
    end: tuple[int, ...]
    hidden: tuple[tuple[int, ...], ...]
    blank: frozenset[int]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]
    ) -> ThoughtMarks | None:
        """Those of the first family whose tokens a tokenizer has; None: it marks no thoughts."""
        known = tokenizer.token_to_id
        for family in FAMILIES:
            tokens = family.tokens or (family.start, family.end)
            if all(known(token) is not None for token in tokens):
                start, end = (tuple(encode(text)) for text in (family.start, family.end))
                pieces = enumerate(token_bytes)
                blank = frozenset(index for index, piece in pieces if piece and piece.isspace())
                others = (tuple(encode(text)) for text in family.headers)
                hidden = sorted((start, end, *others), key=len, reverse=True)
                return cls(family, start, end, tuple(hidden), blank)
        return None

    def opened(self, token_ids: Sequence[int]) -> bool:
        """True if these tokens end with the start of a thought, and nothing but space behind it:
        of a template that has written it, or of a step."""
        for last in range(len(token_ids), len(self.start) - 1, -1):
            if tuple(token_ids[last - len(self.start) : last]) == self.start:
                return True
            if token_ids[last - 1] not in self.blank:
                break
        return False

    def begins(self, token_ids: Sequence[int]) -> bool | None:
        """True if these tokens, the first of a reply, begin a thought; None if that is open."""
        count = min(len(token_ids), len(self.start))
        if tuple(token_ids[:count]) != self.start[:count]:
            return False
        return True if count == len(self.start) else None

    def shown(self, token_ids: Sequence[int]) -> list[int]:
        """A reply's tokens without the marks, which are no text of it."""
        kept, at = list[int](), 0
        while at < len(token_ids):
            found = (len(h) for h in self.hidden if tuple(token_ids[at : at + len(h)]) == h)
            length = next(found, 0)
            kept += () if length else token_ids[at : at + 1]
            at += length or 1
        return kept
