"""A generator that runs elsewhere: which one, what it is asked, what it says; and its tokenizer.

`openai:URL#NAME` is a model behind a server, `vllm:PATH?OPTION=VALUE&...` one in vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import parse_qsl

import yaml

from beamwright.errors import BeamwrightError, InputError
from beamwright.io import read_regular
from beamwright.models.config import read_object, tokenizer_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.sections import ModelSettings, SamplingSettings

PLAIN = ":plain"  # one sample, of a model that a Beamwright server searches with


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
    not said; with the one that ended it, where it is said. ended: at a stop, at the end of a text,
    or at `max_tokens`.
    """

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...]
    ended: Literal["stop", "eos", "length"]


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


class TextSource(Protocol):
    """Writes texts, any number at a time. One thread calls it.

    most: of texts that are asked for in one question. context: most tokens of a path; None: it does
    not say. token_ids: it says those that it drew. searches: each of its texts is the answer of a
    search there.
    """

    most: int | None
    context: int | None
    token_ids: bool
    searches: bool

    def ask(self, key: Hashable, prompt: PromptRequest) -> None:
        """Have it written; its reply is one of `wait`'s."""

    def wait(self, timeout_s: float) -> list[Reply]:
        """What has been answered, at least one reply unless none comes in this time."""

    def cancel(self, key: Hashable) -> None:
        """Nobody wants this reply any more; it may come all the same."""

    def close(self) -> None:
        """Nothing is written any more. It can be used again."""


@dataclass(frozen=True)
class RemoteGenerator:
    """codec: of the same tokenizer. context: most tokens of a path."""

    source: TextSource
    codec: TextCodec
    context: int

    @property
    def vocab(self) -> int:
        """Token ids that the tokenizer has."""
        return self.codec.vocab_size

    @classmethod
    def find(cls, settings: ModelSettings) -> RemoteGenerator:
        """What `--model` names, asked whether it is there, and a tokenizer for it.

        Raises:
            InputError: if there is no such model, or nothing says how its prompts are tokenised.
        """
        spec = settings.model
        kind, _, rest = spec.partition(":")
        source: TextSource
        if kind == "vllm":
            from beamwright.remote.vllm import VllmSource  # noqa: PLC0415 (an extra)

            place, _, given = rest.partition("?")
            if not place:
                raise InputError(f"--model {spec}: write vllm:PATH or vllm:hf:ORG/NAME")
            try:
                pairs = parse_qsl(given, strict_parsing=True)
                options = {name: yaml.safe_load(value) for name, value in pairs}
            except (ValueError, yaml.YAMLError):
                raise InputError(f"--model {spec}: {given!r} is no OPTION=VALUE") from None
            folder = tokenizer_folder(place, spec, weights=True)
            codec = TextCodec.load(folder, settings.chat_template)
            source = VllmSource(folder, options, settings)
        else:
            from beamwright.remote.openai import OpenAISource  # noqa: PLC0415 (an HTTP client)

            url, _, name = rest.partition("#")
            if not url.partition("://")[2] or not url.startswith("http"):
                raise InputError(f"--model {spec}: write openai:http://HOST:PORT/v1#NAME")
            folder = _tokenizer_of(settings, name)
            codec = TextCodec.load(folder, settings.chat_template)
            source = OpenAISource(url.rstrip("/"), name, codec, _read_key(settings.model_key))
        known = source.context or read_object(folder / "config.json").get("max_position_embeddings")
        limits = [limit for limit in (known, settings.context) if isinstance(limit, int) and limit]
        if not limits:
            source.close()
            raise InputError(f"--model {spec}: it does not say its context; give --context N")
        return cls(source, codec, min(limits))


def _tokenizer_of(settings: ModelSettings, name: str) -> Path:
    if settings.tokenizer is not None:
        return tokenizer_folder(settings.tokenizer, f"tokenizer {settings.tokenizer}")
    try:
        return tokenizer_folder(name.removesuffix(PLAIN), f"tokenizer {name}")
    except InputError as error:
        raise InputError(
            f"--model {settings.model}: needs the model's tokenizer here: --tokenizer PATH, "
            "hf:ORG/NAME or bundled"
        ) from error


def _read_key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        words = read_regular(Path(file)).decode().split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "is no text")
        raise InputError(f"--model-key {file}: {why}") from None
    if len(words) != 1 or not words[0].isascii():
        raise InputError(f"--model-key {file}: one key is expected in it")
    return words[0]
