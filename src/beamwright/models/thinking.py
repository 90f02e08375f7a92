"""Finds a thinking model's thoughts by the token ids of marks such as <think> and </think>.

A thought is the text that a model writes before its answer. `thinking.toml` has an entry for each
family of marks. A tokenizer belongs to the first family whose tokens it has. Thoughts are found by
token ids and never by text, because a model may write or quote the same text with other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from beamwright.io import read_toml_beside


class ThoughtFamily(NamedTuple):
    """The marks with which a family of models encloses its thoughts.

    start, end: the texts of the marks.
    tokens: tokens by which a vocabulary is recognised; if empty, the marks themselves.
    headers: other markup in replies that is not part of their text.
    """

    name: str
    start: str
    end: str
    tokens: Sequence[str] = ()
    headers: Sequence[str] = ()


FAMILIES = tuple(ThoughtFamily(**row) for row in read_toml_beside(__file__)["families"])


# Names that chat templates read to turn thinking on or off.
_SWITCHES = ("enable_thinking", "thinking")


def template_switch(names: Collection[str], thinking: str | int) -> dict[str, Any]:
    """Return the arguments with which a chat template turns thinking on or off.

    names: the arguments that the template reads. thinking: the value of `--thinking`.
    """
    given: dict[str, Any] = {name: thinking != "off" for name in _SWITCHES if name in names}
    if "reasoning_effort" in names and thinking == "off":
        given["reasoning_effort"] = "low"  # gpt-oss cannot turn thinking off
    return given


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of thoughts in one tokenizer, as token ids.

    start, end: the token ids of the two marks.
    hidden: the token ids of all marks and headers, which are not part of a reply's text; the
        longest come first.
    blank: tokens that consist of white space.
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
        """Return the marks of the first family whose tokens the tokenizer has.

        None: the tokenizer has no such tokens. token_bytes: the bytes of each token, by id.
        """
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

    def ends_with_start(self, token_ids: Sequence[int]) -> bool:
        """Return whether a prompt or a step ends with the start mark; white space may follow it.

        For a prompt this means that the chat template itself begins the thought.
        """
        for last in range(len(token_ids), len(self.start) - 1, -1):
            if tuple(token_ids[last - len(self.start) : last]) == self.start:
                return True
            if token_ids[last - 1] not in self.blank:
                break
        return False

    def begins_with_start(self, token_ids: Sequence[int]) -> bool | None:
        """Return whether a reply begins with the start mark; None if it is too short to tell.

        token_ids: the reply's first tokens.
        """
        count = min(len(token_ids), len(self.start))
        if tuple(token_ids[:count]) != self.start[:count]:
            return False
        return True if count == len(self.start) else None

    def without_marks(self, token_ids: Sequence[int]) -> list[int]:
        """Return a reply's tokens without the marks and headers of thoughts."""
        kept, at = list[int](), 0
        while at < len(token_ids):
            lengths = (len(h) for h in self.hidden if tuple(token_ids[at : at + len(h)]) == h)
            length = next(lengths, 0)
            kept += () if length else token_ids[at : at + 1]
            at += length or 1
        return kept
