"""How a server is asked, and what it answers: `Dialect`, and OpenAI's, `/v1/completions`.

OpenAI's does not say whether a prompt may be token ids, whether those that were drawn come back,
and above all which of two ways a text has ended: at a stop string or at the end of the reply. vLLM,
SGLang and Beamwright say so, each in a field of its own; llama-server in a dialect of its own
(`llama`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from beamwright.remote.writer import Continuation, PromptRequest, Reply

STOP_FIELDS = ("stop_reason", "matched_stop")  # vLLM's and Beamwright's; SGLang's
_MOST_COUNTED = 2**53  # what is no float any more is no count of tokens either
_MOST_STOPS = 4  # OpenAI's and vLLM's bound; others are found when the text is there


@dataclass(frozen=True)
class Dialect(ABC):
    """path: where it is asked. token_bytes: of JSON, most per token.

    token_ids: they come back. streams: nothing shows that a stop string has ended a text, which is
    therefore read as it is written, and left where the string is. most: texts for one prompt.
    """

    path: str
    token_bytes: int
    most: int | None = None
    token_ids: bool = False
    streams: bool = False

    @abstractmethod
    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """The request. model: which, where it has several."""

    @abstractmethod
    def reply_of(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """The texts of a whole reply; raises KeyError, TypeError or ValueError for what is none."""


@dataclass(frozen=True)
class Completions(Dialect):
    """OpenAI's. ids: prompts are token ids, not texts. extras: fields that are not OpenAI's."""

    path: str = "completions"
    token_bytes: int = 512
    ids: bool = False
    extras: bool = False

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """See `Dialect`; without what nobody asks for: some refuse what they do not know."""
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

    def reply_of(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """See `Dialect`."""
        choices = sorted(answer["choices"], key=lambda choice: int(choice.get("index", 0)))
        if not choices:
            raise ValueError("it has no choices")
        read = count_of(answer, "usage", "prompt_tokens")
        cached = count_of(answer, "usage", "prompt_tokens_details", "cached_tokens")
        return Reply(key, [_written(choice, stops) for choice in choices], read, cached)


def _written(choice: Mapping[str, Any], stops: Sequence[str]) -> Continuation:
    text, ended = text_of(choice["text"]), end_of(choice.get("finish_reason"))
    named = [value for name in STOP_FIELDS if isinstance(value := choice.get(name), str)]
    if ended != "length" and (named or text.endswith(tuple(stops))):
        ended = "stop"
        if named and not text.endswith(named[0]):
            text += text_of(named[0])
    ids = choice.get("token_ids")
    return Continuation(text, None if ids is None else ids_of(ids), logprobs_in(choice), ended)


def logprobs_in(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Of the tokens of a choice, or of a piece of one; raises ValueError for what is no number."""
    return logprobs_of((choice.get("logprobs") or {}).get("token_logprobs") or ())


def end_of(reason: object) -> Literal["stop", "eos", "length"]:
    """What a `finish_reason` means where no stop string is to be seen; raises ConnectionError."""
    if reason == "length":
        return "length"
    if reason in ("stop", "eos", "eos_token", "stop_sequence"):
        return "eos"
    raise ConnectionAbortedError(f"a text ended for the reason {reason!r}")


# --- what a server says, as what it has to be: it may say anything ----------------------------


def text_of(value: object) -> str:
    """A text as a server says it; raises TypeError or ValueError for what is none."""
    if not isinstance(value, str):
        raise TypeError(f"a text that is {type(value).__name__}")
    value.encode()  # halves of characters, which no tokenizer takes
    return value


def ids_of(values: Iterable[object]) -> tuple[int, ...]:
    """Token ids as a server says them; raises TypeError for what are none."""
    ids = tuple(value for value in values if type(value) is int)
    if len(ids) != len(tuple(values)):
        raise TypeError("token ids that are no integers")
    return ids


def logprobs_of(values: Iterable[Any]) -> tuple[float, ...]:
    """Those that are said; raises ValueError for what is no number."""
    values = [value for value in values if value is not None]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ValueError("log-probabilities that are no numbers")
    return tuple(map(float, values))


def count_of(value: Any, *names: str) -> int | None:
    """A count as a server says it, under these names; None for what is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and 0 <= value <= _MOST_COUNTED else None
