"""What a verifier gives back is checked here, whoever wrote the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from beamwright.errors import InputError, NotFiniteError
from beamwright.protocols import StepScored, Verifier
from beamwright.tree import Node

LARGEST_SCORE = 1e30  # sums and squares of many such scores are floats still


def scored(
    verifier: Verifier, nodes: Sequence[Node], scores: Sequence[float | None]
) -> list[StepScored]:
    """An event per step.

    Raises:
        NotFiniteError: if a score is NaN, infinite, or too large to be summed.
        InputError: if there is not one number, or None, per step.
    """
    name = getattr(verifier, "name", type(verifier).__name__)
    if len(scores) != len(nodes):
        raise InputError(f"verifier {name}: {len(scores)} scores for {len(nodes)} steps")
    for node, score in zip(nodes, scores, strict=True):
        if not isinstance(score, Real | None):
            kind = type(score).__name__
            raise InputError(f"verifier {name}: {_place(node)}: {kind}, not a number")
        if not is_usable(score):
            raise NotFiniteError(f"verifier {name}: the score of {_place(node)} is {score!s:.40}")
    plain = [None if score is None else float(score) for score in scores]
    return [StepScored(node, score) for node, score in zip(nodes, plain, strict=True)]


def check_path_score(node: Node) -> None:
    """Raises NotFiniteError if what was made of a path's scores cannot be reckoned with."""
    if not is_usable(node.score):
        steps = [step.step_score for step in node.reply()]
        raise NotFiniteError(f"the scores of {_place(node)}, {steps[-3:]}, make {node.score}")


def is_usable(score: float | None) -> bool:
    """True for no score, and for one that can be compared and summed."""
    return score is None or abs(score) <= LARGEST_SCORE  # false of NaN


def _place(node: Node) -> str:
    return f"problem {node.problem_id}, step {node.depth}"
