"""What a server says, as what it has to be: it may say anything."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx

_MOST_COUNTED = 2**53  # what is no float any more is no count of tokens either


async def bounded(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Its bytes as they come; raises ValueError where there are more."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"it is in {encoding}, which was not asked for")
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > most:
            raise ValueError(f"more than {most:,} bytes, for what was asked")
        yield chunk


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
