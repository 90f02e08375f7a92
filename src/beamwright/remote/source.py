"""What a generator elsewhere is asked, and what it says: texts that go on from a prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from beamwright.errors import BeamwrightError
from beamwright.sections import SamplingSettings


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

    def ask(self, key: Hashable, asked: PromptRequest) -> None:
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
