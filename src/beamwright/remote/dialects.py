"""How a server is asked, and what it answers: OpenAI's `/v1/completions`, and llama-server's way.

OpenAI's does not say whether a prompt may be token ids, whether those that were drawn come back,
and above all which of two ways a text has ended: at a stop string or at the end of the reply. vLLM,
SGLang and Beamwright say so, each in a field of its own; llama-server in a dialect of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from beamwright.errors import BeamwrightError
from beamwright.sections import SamplingSettings

Ended = Literal["stop", "eos", "length"]
"""At a stop string, at the end of a text, or at `max_tokens`."""

OPTIONAL = ("logprobs", "seed")  # left out for a server that refuses them
STOP_FIELDS = ("stop_reason", "matched_stop")  # vLLM's and Beamwright's; SGLang's
_MOST_COUNTED = 2**53  # what is no float any more is no count of tokens either
_MOST_STOPS = 4  # OpenAI's and vLLM's bound; others are found when the text is there


@dataclass(frozen=True)
class PromptRequest:
    """A prompt that is to be continued `count` times.

    text: the same prompt, special tokens included, for who takes no token ids. seed: the same one
    gives the same texts, as far as anything elsewhere does. stops: what ends a text, in it.
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
    """A continuation.

    text: special tokens left out; the stop that ended it included. token_ids: None where they are
    not said; with the one that ended it, where it is said.
    """

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...]
    ended: Ended


@dataclass(frozen=True)
class Reply:
    """What became of what was asked under `key`; fewer texts than asked for, or an error.

    prompt_tokens: that were read; cached_tokens: of these, KV that was there; None: not said.
    tries: requests that it took.
    """

    key: Hashable
    written: Sequence[Continuation] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tries: int = 1
    error: BeamwrightError | None = None


@dataclass(frozen=True)
class Completions:
    """OpenAI's dialect.

    path: where it is asked. token_bytes: of JSON, most per token. most: texts for one prompt.
    token_ids: they come back. streams: nothing shows that a stop string has ended a text, which is
    therefore read as it is written, and left where the string is.
    ids: prompts are token ids, not texts. extras: fields that are not OpenAI's. without: fields
    that the server refuses.
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
        """Build a request without what nobody asks for: some refuse what they do not know.

        model: which, where the server has several.
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

    def reply_of(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """Read a whole reply; raises KeyError, TypeError or ValueError for what is none."""
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
    """Read the log-probabilities of a choice, or of a piece of one; raises as `logprobs_of`."""
    return logprobs_of((choice.get("logprobs") or {}).get("token_logprobs") or ())


def end_of(reason: object) -> Ended:
    """Read a `finish_reason` of a text without a stop string; raises ConnectionError."""
    word = str(reason).lower()
    if word == "length":
        return "length"
    if word in ("stop", "eos", "eos_token", "stop_sequence"):
        return "eos"
    raise ConnectionAbortedError(f"a text ended for the reason {reason!r}")


# --- llama-server -------------------------------------------------------------------------------

LLAMA = "llamacpp"  # of its models in `/v1/models`
CROWDED = "Context size has been exceeded"  # by all slots together, where they share one KV cache
_ENDS: dict[object, Ended] = {"word": "stop", "eos": "eos", "limit": "length"}
_LLAMA_FIELDS = (
    "index", "content", "tokens", "stop_type", "stopping_word", "tokens_evaluated", "timings",
    "completion_probabilities",
)  # fmt: skip


@dataclass(frozen=True)
class LlamaServer:
    """llama-server's own, `/completion`: token ids both ways, and how each text has ended.

    Its OpenAI endpoint says neither. A request that is silent is sampled as a chat's (top-k 40,
    top-p 0.95, min-p 0.05, and whatever the server was started with), so all that can change a draw
    is said: the samplers that there are here, in their order here, and no others.

    It does not say how likely the tokens of a stop string were, nor those before the last of a
    character. With `ignore_eos` it never draws the end, where others draw it and go on.

    Of texts for one prompt, each takes one of the server's slots.

    Fields as those of `Completions`. context: tokens of a slot; 0: not said.
    """

    path: str
    most: int
    context: int
    token_bytes: int = 2048  # it says each token twice, and byte by byte
    token_ids: bool = True
    streams: bool = False

    @classmethod
    def of(cls, url: str, props: Any) -> LlamaServer:
        """Read the slots and the context from its `/props`."""
        context = count_of(props, "default_generation_settings", "n_ctx") or 0
        return cls(f"{url}/completion", count_of(props, "total_slots") or 1, context)

    def body(self, model: str, prompt: PromptRequest) -> dict[str, Any]:
        """As of `Completions`."""
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

    def reply_of(self, key: Hashable, answer: Any, stops: Sequence[str]) -> Reply:
        """As of `Completions`."""
        del stops  # it says which
        every = answer if isinstance(answer, list) else [answer]
        texts = sorted(every, key=lambda text: int(text["index"]))
        first = texts[0]
        cached = count_of(first, "timings", "cache_n")  # `tokens_cached` counts what it will have
        read = count_of(first, "tokens_evaluated")
        return Reply(key, [_written_by_llama(text) for text in texts], read, cached)


Dialect = Completions | LlamaServer


def _written_by_llama(said: Mapping[str, Any]) -> Continuation:
    ended = _ENDS.get(said["stop_type"])
    if ended is None:
        raise ConnectionAbortedError(f"a text ended for the reason {said['stop_type']!r}")
    ids, text = ids_of(said["tokens"]), text_of(said["content"])
    if not ids:
        raise ValueError("it does not say which tokens it drew")
    if ended == "stop":  # it is cut off
        text += text_of(said["stopping_word"])
    values = [each["logprob"] for each in said.get("completion_probabilities") or ()]
    return Continuation(text, ids, logprobs_of(values), ended)


# --- what a server says, as what it has to be: it may say anything ----------------------------


def text_of(value: object) -> str:
    """Check a text of a server's; raises TypeError or ValueError for what is none."""
    if not isinstance(value, str):
        raise TypeError(f"a text that is {type(value).__name__}")
    value.encode()  # halves of characters, which no tokenizer takes
    return value


def ids_of(values: Iterable[object]) -> tuple[int, ...]:
    """Check token ids of a server's; raises TypeError for what are none."""
    ids = tuple(value for value in values if type(value) is int)
    if len(ids) != len(tuple(values)):
        raise TypeError("token ids that are no integers")
    return ids


def logprobs_of(values: Iterable[Any]) -> tuple[float, ...]:
    """Check log-probabilities, nulls left out; raises ValueError for what is no number."""
    values = [value for value in values if value is not None]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ValueError("log-probabilities that are no numbers")
    return tuple(map(float, values))


def count_of(value: Any, *names: str) -> int | None:
    """Find a count under these names; None for what is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and 0 <= value <= _MOST_COUNTED else None
