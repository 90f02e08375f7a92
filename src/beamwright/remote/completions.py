"""How a server is asked, and what it answers: `Dialect`, and OpenAI's, `/v1/completions`.

OpenAI's does not say whether a prompt may be token ids, whether those that were drawn come back,
and above all which of two ways a text has ended: at a stop string or at the end of the reply. vLLM,
SGLang and Beamwright say so, each in a field of its own; llama-server in a dialect of its own
(`llama`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from beamwright.remote.values import count_of, ids_of, logprobs_of, text_of
from beamwright.remote.writer import Continuation, PromptRequest, Reply

STOP_FIELDS = ("stop_reason", "matched_stop")  # vLLM's and Beamwright's; SGLang's
_MOST_STOPS = 4  # OpenAI's and vLLM's bound; others are found when the text is there


class Dialect(Protocol):
    """path: where it is asked. token_bytes: of JSON, most per token.

    token_ids: they come back. streams: nothing shows that a stop string has ended a text, which is
    therefore read as it is written, and left where the string is. most: texts for one prompt.
    """

    @property
    def path(self) -> str: ...

    @property
    def token_bytes(self) -> int: ...

    @property
    def token_ids(self) -> bool: ...

    @property
    def streams(self) -> bool: ...

    @property
    def most(self) -> int | None: ...

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """The request. model: which, where it has several."""

    def reply_of(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """The texts of a whole reply; raises KeyError, TypeError or ValueError for what is none."""


@dataclass(frozen=True)
class Completions:
    """OpenAI's. ids: prompts are token ids, not texts. extras: fields that are not OpenAI's."""

    ids: bool = False
    extras: bool = False
    token_ids: bool = False
    streams: bool = False
    path: str = "completions"
    token_bytes: int = 512

    @property
    def most(self) -> int | None:
        """A text that is read as it is written is left at its stop, the others with it."""
        return 1 if self.streams else None

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
