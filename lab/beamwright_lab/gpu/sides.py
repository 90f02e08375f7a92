"""Shared by the engines of stage `peers`: the workload, the type of a side, and timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from beamwright_lab.gpu.context import Context, release, synchronize

_TINY = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=512"


@dataclass(frozen=True)
class Case:
    """Workload: n paths of `tokens` sampled tokens after one prompt of `prompt` tokens.

    counts: the values of n.
    """

    model: str
    prompt: int
    tokens: int
    counts: tuple[int, ...]


USUAL = Case("qwen2.5-1.5b", prompt=128, tokens=128, counts=(16, 64))
SMOKE = Case(_TINY, prompt=8, tokens=6, counts=(4, 8))


@dataclass(frozen=True)
class Side:
    """An engine or configuration to compare; one row per n.

    cost_s: seconds of a row on a card with its warm-up. Cheap rows run first, and a row needs this
    much time left. counts: values of n; None means the case's. said: its settings, for the table.
    """

    name: str
    measure: Callable[[int], dict[str, Any]]
    cost_s: float
    counts: tuple[int, ...] | None = None
    said: str = ""


def timed(context: Context, work: Callable[[], object], num_tokens: int) -> dict[str, Any]:
    """Time `work` three times; return a row of the faster of the last two."""
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
    """Build a row from the seconds of calls, the first of which was a warm-up."""
    least_s = min(took_s[1:])
    return {
        "s": round(least_s, 4),
        "tokens_per_s": round(num_tokens / least_s, 1),
        "first_s": round(took_s[0], 2),
    }
