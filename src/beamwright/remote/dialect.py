"""Dialect: which of the ways to say it a server understands, found out by asking it.

The protocol of `/v1/completions` does not say whether a prompt may be token ids, whether those that
were drawn come back, and above all which of two ways a text has ended: at a stop string or at the
end of the reply. vLLM, SGLang and Beamwright say so, each in a field of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from beamwright.remote.source import Continuation, PromptRequest

_MOST_STOPS = 4  # OpenAI's and vLLM's bound; others are found when the text is there
_MOST_COUNTED = 2**53  # what is no float any more is no count of tokens either
_ENDS = ("stop", "eos", "eos_token", "stop_sequence")
_STOP_FIELDS = ("stop_reason", "matched_stop")  # vLLM's and Beamwright's; SGLang's


class Stops(Enum):
    """How a text shows that a stop string has ended it."""

    INCLUDED = "it ends with the string"
    NAMED = "a field names the string"
    UNKNOWN = "not at all: it is read as it is written, and left where the string is"


@dataclass(frozen=True)
class Dialect:
    """ids: prompts are token ids, not texts. extras: it takes fields that are not OpenAI's.
    returns_ids: token ids come back."""

    ids: bool
    extras: bool
    returns_ids: bool = False
    stops: Stops = Stops.UNKNOWN

    @property
    def streams(self) -> bool:
        """Texts are read as they are written."""
        return self.stops is Stops.UNKNOWN

    def body(self, model: str, asked: PromptRequest) -> dict[str, Any]:
        """The request, without what its sampling does not ask for: some refuse what they do not
        know."""
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(asked.token_ids) if self.ids else asked.text(),
            "max_tokens": asked.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": asked.seed,
            "logprobs": 1,
        }
        if asked.count > 1:
            body["n"] = asked.count
        for name in ("top_k", "min_p"):
            value = getattr(sampling, name)
            if value is not None:
                body[name] = value
        if asked.ignore_eos:
            body["ignore_eos"] = True
        if asked.stops and not self.streams:
            body["stop"] = list(asked.stops[:_MOST_STOPS])
        if self.streams:
            body["stream"] = True
        if self.extras:
            body["return_token_ids"] = True
            body["include_stop_str_in_output"] = True
            if not self.ids:
                body["add_special_tokens"] = False
        return body

    def written(self, choice: Mapping[str, Any], stops: Sequence[str]) -> Continuation:
        """One text of a reply; raises KeyError, TypeError or ValueError for what is none."""
        text, ended = text_of(choice["text"]), _ended(choice, stops)
        named = next((choice[each] for each in _STOP_FIELDS if choice.get(each) is not None), None)
        if ended == "stop" and isinstance(named, str) and not text.endswith(named):
            text += text_of(named)
        ids = choice.get("token_ids")
        if ids is not None and not all(type(each) is int for each in ids):
            raise TypeError("token ids that are no integers")
        return Continuation(
            text=text,
            token_ids=None if ids is None else tuple(ids),
            logprobs=logprobs_of(choice),
            ended=ended,
        )


class BrokenOff(Exception):
    """A text was left in the middle: its server is going, say. The next time it may go well."""


def logprobs_of(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Of the tokens of a choice, or of a piece of one; raises ValueError for what is no number."""
    found = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    said = [each for each in found if each is not None]
    if not all(type(each) in (int, float) and math.isfinite(each) for each in said):
        raise ValueError("log-probabilities that are no numbers")
    return tuple(map(float, said))


def text_of(value: object) -> str:
    """A text as a server says it; raises TypeError or ValueError for what is none."""
    if not isinstance(value, str):
        raise TypeError(f"a text that is {type(value).__name__}")
    value.encode()  # halves of characters, which no tokenizer takes
    return value


def count_of(value: object) -> int | None:
    """A count as a server says it; None for what is none."""
    return value if type(value) is int and 0 <= value <= _MOST_COUNTED else None


def object_of(value: object) -> Mapping[str, Any]:
    """What a server says of something; nothing, where it is no object."""
    return value if isinstance(value, dict) else {}


def end_of(reason: object) -> Literal["eos", "length"]:
    """What a `finish_reason` means where no stop string is to be seen; raises BrokenOff."""
    if reason == "length":
        return "length"
    if reason in _ENDS:
        return "eos"
    raise BrokenOff(f"a text ended for the reason {reason!r}")


def _ended(choice: Mapping[str, Any], stops: Sequence[str]) -> Literal["stop", "eos", "length"]:
    if end_of(choice.get("finish_reason")) == "length":
        return "length"
    named = [choice[each] for each in _STOP_FIELDS if isinstance(choice.get(each), str)]
    if named or any(str(choice["text"]).endswith(each) for each in stops):
        return "stop"
    return "eos"


def stops_shown(choice: Mapping[str, Any], stop: str) -> Stops:
    """How a server shows that this string, which it must have met, has ended a text."""
    if str(choice.get("text", "")).endswith(stop):
        return Stops.INCLUDED
    if any(choice.get(each) == stop for each in _STOP_FIELDS):
        return Stops.NAMED
    return Stops.UNKNOWN
