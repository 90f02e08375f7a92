"""From step scores to a path's score: last, min, prod or mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}


def aggregate(step_scores: Sequence[float | None], how: str) -> float | None:
    """One score for a path. Steps without a score (empty ones) are left out; None if all are.

    So "last" never scores an empty step.
    """
    scores = [score for score in step_scores if score is not None]
    return AGGREGATES[how](scores) if scores else None
