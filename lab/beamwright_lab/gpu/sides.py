"""What the sides of `peers` share: the case, what a side is, and how its seconds are taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from beamwright_lab.gpu.context import Context, release, synchronize

_TINY = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=512"


@dataclass(frozen=True)
class Case:
    """Paths of `tokens` sampled tokens each behind one prompt of `prompt`; `counts`: how many."""

    model: str
    prompt: int
    tokens: int
    counts: tuple[int, ...]


USUAL = Case("qwen2.5-1.5b", prompt=128, tokens=128, counts=(16, 64))
SMOKE = Case(_TINY, prompt=8, tokens=6, counts=(4, 8))


@dataclass(frozen=True)
class Side:
    """Who writes n paths, a row per n.

    cost_s: seconds of a row on a card, warming up included: cheap rows go first, and a row is not
    begun with less. counts: of the case, where it leaves some out. said: of its settings.
    """

    name: str
    measure: Callable[[int], dict[str, Any]]
    cost_s: float
    counts: tuple[int, ...] | None = None
    said: str = ""


def timed(context: Context, work: Callable[[], object], num_tokens: int) -> dict[str, Any]:
    """The better of two calls, after one that warms up."""
    took_s = []
    for _ in range(3):
        synchronize(context.device)
        start_s = time.perf_counter()
        work()
        synchronize(context.device)
        took_s.append(time.perf_counter() - start_s)
    release(context.device)
    return seconds_of(took_s, num_tokens)


def seconds_of(took_s: list[float], num_tokens: int) -> dict[str, Any]:
    """A row of calls of so many tokens each, the first of which warmed up."""
    least_s = min(took_s[1:])
    return {
        "s": round(least_s, 4),
        "tokens_per_s": round(num_tokens / least_s, 1),
        "first_s": round(took_s[0], 2),
    }
