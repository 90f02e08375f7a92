"""Build requests and parse replies: OpenAI's `/v1/completions`, and llama-server's own API.

OpenAI's format leaves open whether a prompt may be token ids and whether sampled ids are returned.
Above all, its `finish_reason` is the same for a text that ended at a stop string and for one that
ended at the EOS token. vLLM, SGLang and Beamwright add a field for that; llama-server's own API has
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from beamwright.errors import BeamwrightError
from beamwright.sections import SamplingSettings

# Why a text ended: at a stop string, at the EOS token, or at `max_tokens`.
Ended = Literal["stop", "eos", "length"]

OPTIONAL = ("logprobs", "seed")  # fields to omit if a server refuses them
# Fields with the stop string that ended a text: vLLM's and Beamwright's, and SGLang's.
STOP_FIELDS = ("stop_reason", "matched_stop")
_MOST_COUNTED = 2**53  # maximum count to accept; larger integers are inexact in JSON
_MOST_STOPS = 4  # maximum number of stop strings in a request; others are found in the text


@dataclass(frozen=True)
class PromptRequest:
    """A request to sample `count` continuations of a prompt.

    text: returns the prompt with special tokens, for servers that take no token ids.
    seed: the sampling seed, with which most servers repeat a text, though none promises to.
    stops: stop strings; the returned text includes the one that ended it.
    """

    token_ids: tuple[int, ...]
    text: Callable[[], str]
    count: int
    seed: int
    max_tokens: int
    sampling: SamplingSettings
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Continuation:
    """One text that a server generated for a prompt.

    text: the text without special tokens, including the stop string that ended it.
    token_ids: the sampled ids, with the end token if the server returns it; None if the server
        returns no ids.
    """

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...]
    ended: Ended


@dataclass(frozen=True)
class Reply:
    """The result of one request: its texts, possibly fewer than requested, or an error.

    key: the caller's key of the request, as passed to `RemoteGenerator.send`.
    written: the generated texts.
    prompt_tokens: prompt tokens that the server read; None if not reported.
    cached_tokens: prompt tokens found in the server's prefix cache; None if not reported.
    tries: number of requests sent, including retries.
    """

    key: Hashable
    written: Sequence[Continuation] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tries: int = 1
    error: BeamwrightError | None = None


@dataclass(frozen=True)
class Completions:
    """Dialect of OpenAI's `/v1/completions`, with what a server was found to support.

    path: the URL path.
    token_bytes: maximum bytes of JSON in a reply per generated token.
    most: maximum number of texts per request; None for no limit.
    token_ids: True if the server returns sampled token ids.
    streams: True if the server does not show which stop string ended a text. Texts are then
        streamed, and the stream is closed at the stop string.
    ids: True to send prompts as token ids instead of text.
    extras: True to send fields that OpenAI's format does not have.
    without: names of fields to omit, because the server refuses them.
    """

    path: str = "completions"
    token_bytes: int = 512
    most: int | None = None
    token_ids: bool = False
    streams: bool = False
    ids: bool = False
    extras: bool = False
    without: frozenset[str] = frozenset()

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """Build the JSON body of a request.

        Fields without effect are omitted, because servers may refuse fields that they do not know.

        model: the model's name on the server.
        """
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
            "seed": None if "seed" in self.without else prompt.seed,
            "logprobs": None if "logprobs" in self.without else 1,
        }
        return {
            "model": model,
            "prompt": list(prompt.token_ids) if self.ids else prompt.text(),
            "max_tokens": prompt.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def parse_reply(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """Parse a JSON reply to the request `key`.

        stops: the request's stop strings.

        Raises:
            KeyError, TypeError, ValueError: if the reply is invalid.
        """
        choices = sorted(answer["choices"], key=lambda choice: int(choice.get("index", 0)))
        if not choices:
            raise ValueError("the reply has no choices")
        read = find_count(answer, "usage", "prompt_tokens")
        cached = find_count(answer, "usage", "prompt_tokens_details", "cached_tokens")
        return Reply(key, [_parse_choice(choice, stops) for choice in choices], read, cached)


def _parse_choice(choice: Mapping[str, Any], stops: Sequence[str]) -> Continuation:
    text, ended = parse_text(choice["text"]), parse_finish_reason(choice.get("finish_reason"))
    named = [value for name in STOP_FIELDS if isinstance(value := choice.get(name), str)]
    if ended != "length" and (named or text.endswith(tuple(stops))):
        ended = "stop"
        if named and not text.endswith(named[0]):
            text += parse_text(named[0])
    ids = choice.get("token_ids")
    return Continuation(
        text, None if ids is None else parse_ids(ids), choice_logprobs(choice), ended
    )


def choice_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Read the log-probabilities of a choice or chunk; raises what `parse_logprobs` raises."""
    return parse_logprobs((choice.get("logprobs") or {}).get("token_logprobs") or ())


def parse_finish_reason(reason: object) -> Ended:
    """Parse a `finish_reason`; raises ConnectionError for an unknown one, such as an abort.

    "stop" counts as EOS; the caller then looks for a stop string in the text.
    """
    word = str(reason).lower()
    if word == "length":
        return "length"
    if word in ("stop", "eos", "eos_token", "stop_sequence"):
        return "eos"
    raise ConnectionAbortedError(f"unknown finish_reason {reason!r}")


# --- llama-server -------------------------------------------------------------------------------

LLAMA = "llamacpp"  # `owned_by` of llama-server's models in `/v1/models`
# llama-server's error if a prompt exceeds the context, or if all slots fill a shared KV cache.
CROWDED = "Context size has been exceeded"
_ENDS: dict[object, Ended] = {"word": "stop", "eos": "eos", "limit": "length"}
_LLAMA_FIELDS = (
    "index", "content", "tokens", "stop_type", "stopping_word", "tokens_evaluated", "timings",
    "completion_probabilities",
)  # fmt: skip


@dataclass(frozen=True)
class LlamaServer:
    """Dialect of llama-server's own `/completion`, which has token ids and stop reasons.

    The server's OpenAI endpoint has neither. Sampling fields that a request omits have defaults for
    chat (top-k 40, top-p 0.95, min-p 0.05, and the server's command line). A request therefore sets
    every field that changes sampling, and lists only the samplers that Beamwright has, in
    Beamwright's order.

    The server reports no log-probabilities of a stop string's tokens, and of a character's tokens
    only that of the last one. With `ignore_eos` the server never samples the end token; other
    servers sample it and continue. Each text of a request takes one of the server's slots.

    Attributes are those of `Completions`, and context: tokens per slot; 0 if not reported.
    """

    path: str
    most: int
    context: int
    token_bytes: int = 2048  # replies contain each token twice, once byte by byte
    token_ids: bool = True
    streams: bool = False

    @classmethod
    def of(cls, url: str, props: Any) -> LlamaServer:
        """Build the dialect from the server's `/props`: its number of slots and its context."""
        context = find_count(props, "default_generation_settings", "n_ctx") or 0
        return cls(f"{url}/completion", find_count(props, "total_slots") or 1, context)

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """Build a request, as `Completions.body` does."""
        sampling = prompt.sampling
        return {
            "model": model,
            "prompt": list(prompt.token_ids),
            "n_predict": prompt.max_tokens,
            "n_cmpl": prompt.count,
            "stop": list(prompt.stops),
            "seed": prompt.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            **{"repeat_penalty": 1.0, "dynatemp_range": 0.0, "mirostat": 0, "min_keep": 0},
            **{"logit_bias": [], "grammar": "", "ignore_eos": prompt.ignore_eos},
            **{"n_probs": 1, "post_sampling_probs": False, "return_tokens": True},
            **{"cache_prompt": True, "stream": False, "response_fields": _LLAMA_FIELDS},
        }

    def parse_reply(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """Parse a reply, as `Completions.parse_reply` does."""
        del stops  # not needed, because the reply contains the stop string
        every = answer if isinstance(answer, list) else [answer]
        texts = sorted(every, key=lambda text: int(text["index"]))
        first = texts[0]
        # Read `cache_n`, since `tokens_cached` is the cache's size after the request.
        cached = find_count(first, "timings", "cache_n")
        read = find_count(first, "tokens_evaluated")
        return Reply(key, [_parse_llama_text(text) for text in texts], read, cached)


Dialect = Completions | LlamaServer


def _parse_llama_text(said: Mapping[str, Any]) -> Continuation:
    ended = _ENDS.get(said["stop_type"])
    if ended is None:
        raise ConnectionAbortedError(f"unknown stop_type {said['stop_type']!r}")
    ids, text = parse_ids(said["tokens"]), parse_text(said["content"])
    if not ids:
        raise ValueError("the reply has no token ids")
    if ended == "stop":  # the server omits the stop string
        text += parse_text(said["stopping_word"])
    values = [each["logprob"] for each in said.get("completion_probabilities") or ()]
    return Continuation(text, ids, parse_logprobs(values), ended)


# --- parsers of reply fields, which may have any type ------------------------------------------


def parse_text(value: object) -> str:
    """Return a text field; raises TypeError or ValueError if it is not valid text."""
    if not isinstance(value, str):
        raise TypeError(f"a text is {type(value).__name__}")
    value.encode()  # raises for lone surrogates, which no tokenizer accepts
    return value


def parse_ids(values: Iterable[object]) -> tuple[int, ...]:
    """Return token ids; raises TypeError if one is not an integer."""
    ids = tuple(value for value in values if type(value) is int)
    if len(ids) != len(tuple(values)):
        raise TypeError("token ids are not integers")
    return ids


def parse_logprobs(values: Iterable[Any]) -> tuple[float, ...]:
    """Return log-probabilities without nulls; raises ValueError if one is not a number."""
    values = [value for value in values if value is not None]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ValueError("log-probabilities are not finite numbers")
    return tuple(map(float, values))


def find_count(value: Any, *names: str) -> int | None:
    """Return the count at a path of keys in a JSON object; None if it is missing or not a count."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and 0 <= value <= _MOST_COUNTED else None
