"""Dialect: which of the ways to say it a server understands, and what its replies say.

The protocol of `/v1/completions` does not say whether a prompt may be token ids, whether those that
were drawn come back, and above all which of two ways a text has ended: at a stop string or at the
end of the reply. vLLM, SGLang and Beamwright say so, each in a field of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from beamwright.remote.source import Continuation, PromptRequest, Reply

_MOST_STOPS = 4  # OpenAI's and vLLM's bound; others are found when the text is there
_MOST_COUNTED = 2**53  # what is no float any more is no count of tokens either
_ENDS = ("stop", "eos", "eos_token", "stop_sequence")
_STOP_FIELDS = ("stop_reason", "matched_stop")  # vLLM's and Beamwright's; SGLang's


class Stops(Enum):
    """How a text shows that a stop string has ended it."""

    INCLUDED = "it ends with the string"
    NAMED = "a field names the string"
    UNKNOWN = "not at all: it is read as it is written, and left where the string is"

    @classmethod
    def shown(cls, choice: Mapping[str, Any], stop: str) -> Stops:
        """By a text which this string, that it must have met, has ended."""
        if str(choice.get("text", "")).endswith(stop):
            return cls.INCLUDED
        named = any(choice.get(name) == stop for name in _STOP_FIELDS)
        return cls.NAMED if named else cls.UNKNOWN


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

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """The request, without what its sampling does not ask for: some refuse what they do not
        know."""
        sampling = prompt.sampling
        stops = None if self.streams else list(prompt.stops[:_MOST_STOPS])
        optional = {
            "n": prompt.count if prompt.count > 1 else None,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "ignore_eos": prompt.ignore_eos or None,
            "stop": stops or None,
            "stream": self.streams or None,
            "return_token_ids": self.extras or None,
            "include_stop_str_in_output": self.extras or None,
            "add_special_tokens": False if self.extras and not self.ids else None,
        }
        return {
            "model": model,
            "prompt": list(prompt.token_ids) if self.ids else prompt.text(),
            "max_tokens": prompt.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": prompt.seed,
            "logprobs": 1,
            **{name: value for name, value in optional.items() if value is not None},
        }


def reply_of(answer: Mapping[str, Any], stops: Sequence[str], key: Hashable = None) -> Reply:
    """The texts of a whole reply; raises KeyError, TypeError or ValueError for what is none."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice.get("index", 0)))
    if not choices:
        raise ValueError("it has no choices")
    usage = _object(answer.get("usage"))
    cached = _object(usage.get("prompt_tokens_details")).get("cached_tokens")
    written = [_written(choice, stops) for choice in choices]
    return Reply(key, written, count_of(usage.get("prompt_tokens")), count_of(cached))


def _written(choice: Mapping[str, Any], stops: Sequence[str]) -> Continuation:
    text, ended = text_of(choice["text"]), end_of(choice.get("finish_reason"))
    fields = [choice[name] for name in _STOP_FIELDS if choice.get(name) is not None]
    named = any(isinstance(value, str) for value in fields)
    if ended != "length" and (named or text.endswith(tuple(stops))):
        ended = "stop"
        if fields and isinstance(fields[0], str) and not text.endswith(fields[0]):
            text += text_of(fields[0])
    ids = choice.get("token_ids")
    if ids is not None and not all(type(token) is int for token in ids):
        raise TypeError("token ids that are no integers")
    return Continuation(text, None if ids is None else tuple(ids), logprobs_of(choice), ended)


class BrokenOff(Exception):
    """A text was left in the middle: its server is going, say. The next time it may go well."""


def logprobs_of(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Of the tokens of a choice, or of a piece of one; raises ValueError for what is no number."""
    values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    values = [value for value in values if value is not None]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ValueError("log-probabilities that are no numbers")
    return tuple(map(float, values))


def text_of(value: object) -> str:
    """A text as a server says it; raises TypeError or ValueError for what is none."""
    if not isinstance(value, str):
        raise TypeError(f"a text that is {type(value).__name__}")
    value.encode()  # halves of characters, which no tokenizer takes
    return value


def count_of(value: object) -> int | None:
    """A count as a server says it; None for what is none."""
    return value if type(value) is int and 0 <= value <= _MOST_COUNTED else None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def end_of(reason: object) -> Literal["stop", "eos", "length"]:
    """What a `finish_reason` means where no stop string is to be seen; raises BrokenOff."""
    if reason == "length":
        return "length"
    if reason in _ENDS:
        return "eos"
    raise BrokenOff(f"a text ended for the reason {reason!r}")
