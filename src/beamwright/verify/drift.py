"""Drift of a verifier's quantised weights: step scores beside those of the same weights without."""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.attention import make_attention
from beamwright.config import ModelSettings
from beamwright.errors import InputError
from beamwright.models import TreeModel
from beamwright.tree import Node, SearchTree, StopReason
from beamwright.verify.make import resolve_verifier

_KV_TOKENS = 8192  # what one sample's steps may need


def measure_score_drift(
    settings: ModelSettings, samples: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """How far `settings.verifier_weights` moves the scores of the steps of these solutions.

    samples: problems and solutions, whose steps end with a blank line.
    steps: how many have a score both ways. max_abs_score_diff, mean_abs_score_diff: over them.

    Raises:
        InputError: if the verifier has no weights, or scores none of the steps.
    """
    plain = settings.model_copy(update={"verifier_weights": "auto"})
    pairs = zip(_scores(plain, samples), _scores(settings, samples), strict=True)
    diffs = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    if not diffs:
        raise InputError(f"--verifier {settings.scorer}: it scores none of the sample steps")
    return {
        "steps": len(diffs),
        "max_abs_score_diff": max(diffs),
        "mean_abs_score_diff": sum(diffs) / len(diffs),
    }


def _scores(settings: ModelSettings, samples: Sequence[tuple[str, str]]) -> list[float | None]:
    source = resolve_verifier(settings)
    if source.model is None:
        raise InputError(
            f"--verifier-weights {settings.verifier_weights}: "
            f"--verifier {settings.scorer} has no weights"
        )
    decoder = source.model.decoder
    budget = _KV_TOKENS * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    found: list[float | None] = []
    for number, sample in enumerate(samples):
        model = TreeModel(decoder, make_attention(settings.attention), budget)
        verifier = source.on(model)
        for node in chain_of_steps(number, *sample):
            found += verifier.score([node])
    return found


def chain_of_steps(number: int, problem: str, solution: str) -> list[Node]:
    """The solution's steps, one below the other. Their own token ids do not matter here."""
    tree = SearchTree(number, (0,), problem)
    parts = solution.split("\n\n")
    steps = [f"{part}\n\n" for part in parts[:-1]] + parts[-1:]
    node, found = tree.root, []
    for step in steps:
        (child,) = tree.expand(node, 1)
        stop = StopReason.EOS if step is steps[-1] else StopReason.DELIMITER
        tree.commit(child, (0,), (0.0,), stop, node.text + step)
        tree.keep(child)
        found.append(child)
        node = child
    return found
