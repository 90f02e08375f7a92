"""A verifier that is the user's own Python function or object."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from beamwright.errors import InputError
from beamwright.tree import Node

ScoreFunction = Callable[[str, list[str]], float | None]
"""From the problem's text and the texts of a path's steps to the score of the last one."""


class CallableVerifier:
    """Scores a step by `function(problem, steps)`.

    steps: the path's steps without the empty ones, delimiters included; an empty step is not
    scored. The function may return None for no opinion. aggregate: steps to a path's score.
    """

    probabilities = False

    def __init__(self, function: ScoreFunction, aggregate: str = "last") -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.default_aggregate = aggregate
        self.beside_decoding = _may_run_beside(function)

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score for every step that has text.

        Raises:
            InputError: if the function raises, or returns something else than a finite number.
        """
        return [self._score(node) if node.step_text.strip() else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""

    def _score(self, node: Node) -> float | None:
        steps = [each.step_text for each in node.reply() if each.step_text.strip()]
        where = f"verifier {self.name} on problem {node.problem_id}, step {node.depth}"
        try:
            value: Any = self.function(node.root.problem_text, steps)
        except Exception as error:  # whatever a user's function raises
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"{where}: it raised {line}") from error
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise InputError(f"{where}: it returned {kind}, not a number") from error
        except OverflowError as error:
            raise InputError(f"{where}: it returned a number beyond all floats") from error
        if not math.isfinite(number):
            raise InputError(f"{where}: it returned {number}, not a finite number")
        return number


class ObjectVerifier:
    """A verifier of the user's own, with the usual answers to what it does not say.

    listwise: unless it says that scores are each their own, or that it may be called beside
    decoding, where batches are as they come.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = str(getattr(function, "name", type(function).__name__))
        self.default_aggregate: str = getattr(function, "default_aggregate", "last")
        self.probabilities = bool(getattr(function, "probabilities", False))
        self.token_stats: frozenset[str] = frozenset(getattr(function, "token_stats", ()))
        self.beside_decoding = _may_run_beside(function)
        self.listwise = bool(getattr(function, "listwise", not self.beside_decoding))

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """What the user's object answers.

        Raises:
            InputError: if it raises.
        """
        try:
            return list(self.function.score(nodes))
        except Exception as error:  # whatever a user's object raises
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"verifier {self.name}: it raised {line}") from error

    def release(self, nodes: Sequence[Node]) -> None:
        release: Callable[[Sequence[Node]], None] | None = getattr(self.function, "release", None)
        if release is not None:
            release(nodes)


def _may_run_beside(function: Any) -> bool:
    """A user's code runs on the caller's thread unless it says that it need not."""
    return bool(getattr(function, "beside_decoding", False))
