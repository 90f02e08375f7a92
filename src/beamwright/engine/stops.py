"""Where a step ends: EOS, limits, the delimiter, and strings that end a whole path.

All of it is the host's, which looks at every token one step late: the device knows nothing of
stops, so that a captured step is the same whatever ends its rows. Texts are searched as bytes,
across token boundaries; the token that completes one ends the step, with whatever it holds behind
it. What was drawn beyond is dropped, so that where a step ends depends on its tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.engine.row import Row
from beamwright.models.tokenizer import TextCodec
from beamwright.tree import StopReason


class StopFinder:
    """Why rows end. codec: None without a tokenizer, where nothing but limits ends a step."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._eos = codec.eos_ids if codec is not None else frozenset[int]()
        self._pieces = codec.token_bytes if codec is not None else []

    def reason(self, row: Row, drawn: Sequence[int]) -> StopReason | None:
        """Why a row ends with the last of these tokens, drawn behind its own; None: it goes on.

        To be asked once about every token, in their order. A stop string comes first, whose text is
        cut; then EOS, a limit that ends the path, the delimiter, step limits.
        """
        step, limit = row.decoding.step, row.limit
        at_limit = len(row.tokens) + len(drawn) >= limit.tokens
        delimited = step.step_tokens is None and self._completes_delimiter(row, drawn)
        if step.stop_strings and self._completes_string(row, drawn):
            return StopReason.STOP_STRING
        if drawn[-1] in self._eos and not step.ignore_eos:
            return StopReason.EOS
        if at_limit and (limit.reason.ends_path or not delimited):
            return limit.reason
        return StopReason.DELIMITER if delimited else None

    def _completes_delimiter(self, row: Row, drawn: Sequence[int]) -> bool:
        if self._codec is None:
            return False
        delimiter = row.decoding.step.delimiter.encode()
        if row.step_end is None:
            row.step_end = self._text([*row.tokens, *drawn[:-1]])
        text = row.step_end + self._pieces[drawn[-1]]
        row.step_end = _last(text, len(delimiter) - 1)
        return delimiter in text

    def _completes_string(self, row: Row, drawn: Sequence[int]) -> bool:
        """True if its bytes are there, and the reply's text has it: special tokens have no text,
        and some tokenizers leave out the space that a text begins with."""
        if self._codec is None:
            return False
        strings = row.decoding.step.stop_strings
        length = max(len(string.encode()) for string in strings) - 1
        if row.reply_end is None:
            row.reply_end = self._text([*row.reply_ids(), *drawn[:-1]])
        text = row.reply_end + self._pieces[drawn[-1]]
        row.reply_end = _last(text, length)
        if not any(string.encode() in text for string in strings):
            return False
        reply = self._codec.decode([*row.reply_ids(), *drawn])
        return any(string in reply for string in strings)

    def _text(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces[token] for token in token_ids)


def text_before(text: str, stop_strings: Sequence[str]) -> str:
    """A text up to the first of these strings in it; all of it if there is none."""
    starts = [text.find(string) for string in stop_strings]
    return text[: min((start for start in starts if start >= 0), default=len(text))]


def _last(text: bytes, length: int) -> bytes:
    return text[max(0, len(text) - length) :]
