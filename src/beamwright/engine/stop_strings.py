"""Stop strings: texts that end a path wherever they begin, found by the host in what rows drew.

The device knows nothing of them, so a captured step is the same with and without, and a request may
bring its own: tables as delimiters have them would cost a pass over the vocabulary for every set.
What a row drew in an iteration, at most 16 tokens, is searched when it is over; what lies behind
the token that completes a string is dropped, so that where a path ends depends on its tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.engine.row import Row
from beamwright.engine.stops import CODE_STOP_STRING
from beamwright.models import TextCodec


class StopStrings:
    """Finds the stop strings of rows that have some.

    A string is there when its bytes are, and the text of the reply has it: special tokens have no
    text, and some tokenizers leave out the space that a text begins with.

    codec: None without a tokenizer, where no string is found.
    """

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec

    def mark(self, row: Row, tokens: Sequence[int], codes: list[int]) -> None:
        """Add to the code of the token, of these that a row has drawn, that completes a string."""
        strings = row.decoding.step.stop_strings
        if not strings or self._codec is None:
            return
        wanted = [string.encode() for string in strings]
        length = max(map(len, wanted)) - 1
        pieces = self._codec.token_bytes()
        if row.ending is None:
            row.ending = _ending(row, pieces, length)
        added = [pieces[token] for token in tokens]
        text = row.ending + b"".join(added)
        if any(each in text for each in wanted):
            seen = row.ending
            for number, piece in enumerate(added):
                seen += piece
                if not any(each in seen for each in wanted):
                    continue
                reply = self._codec.decode([*row.reply_ids(), *tokens[: number + 1]])
                if any(string in reply for string in strings):
                    codes[number] |= CODE_STOP_STRING
                    break
        row.ending = _last(text, length)


def text_before(text: str, stop_strings: Sequence[str]) -> str:
    """A text up to the first of these strings in it; all of it if there is none."""
    starts = [text.find(string) for string in stop_strings]
    return text[: min((start for start in starts if start >= 0), default=len(text))]


def _ending(row: Row, pieces: Sequence[bytes], length: int) -> bytes:
    """The last bytes of a reply, its row's tokens included."""
    found = b""
    for token in reversed(row.reply_ids()):
        if len(found) >= length:
            break
        found = pieces[token] + found
    return _last(found, length)


def _last(text: bytes, length: int) -> bytes:
    return text[max(0, len(text) - length) :]
