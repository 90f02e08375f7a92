"""Which remote generator is meant, what it is asked, and what it says: texts that go on.

`openai:URL#NAME` is a model behind a server, `vllm:PATH?OPTION=VALUE` one in vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import yaml

from beamwright.errors import BeamwrightError, InputError
from beamwright.sections import SamplingSettings

PLAIN = ":plain"  # one sample, of a model that a Beamwright server searches with


@dataclass(frozen=True)
class RemoteModel:
    """What `--model` says of a generator that runs elsewhere.

    place: a server's base URL, or what vLLM loads. name: of the model, as its server knows it; None
    for the only one there. options: of vLLM's engine.
    """

    kind: Literal["openai", "vllm"]
    place: str
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: str) -> RemoteModel:
        """Raises InputError for what is no such name."""
        kind, _, rest = spec.partition(":")
        if kind == "vllm":
            place, _, options = rest.partition("?")
            if not place:
                raise InputError(f"--model {spec}: write vllm:PATH or vllm:hf:ORG/NAME")
            return cls("vllm", place, None, _options(spec, options))
        url, _, name = rest.partition("#")
        if not _is_url(url):
            raise InputError(f"--model {spec}: write openai:http://HOST:PORT/v1#NAME")
        return cls("openai", url.rstrip("/"), name or None)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # of a port
        return False


def _options(spec: str, text: str) -> dict[str, Any]:
    options = {}
    for assignment in text.split("&") if text else ():
        name, equals, value = assignment.partition("=")
        if not (name.isidentifier() and equals and value):
            raise InputError(f"--model {spec}: {assignment!r} is no OPTION=VALUE")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"--model {spec}: {name}: {value!r} is no value") from None
    return options


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


@dataclass(frozen=True)
class GeneratorFacts:
    """What is known of a generator elsewhere before it writes anything.

    context: most tokens of a path; None: it does not say. token_ids: it says those that it drew.
    searches: each of its texts is the answer of a search there.
    """

    context: int | None
    token_ids: bool
    searches: bool = False


class TextSource(Protocol):
    """Writes texts, any number at a time. One thread calls it.

    most: of texts that are asked for in one question.
    """

    facts: GeneratorFacts

    @property
    def most(self) -> int | None: ...

    def ask(self, key: Hashable, prompt: PromptRequest) -> None:
        """Have it written; its reply is one of `wait`'s."""
        ...

    def wait(self, timeout_s: float) -> list[Reply]:
        """What has been answered, at least one reply unless none comes in this time."""
        ...

    def cancel(self, key: Hashable) -> None:
        """Nobody wants this reply any more; it may come all the same."""
        ...

    def close(self) -> None:
        """Nothing is written any more. It can be used again."""
        ...
