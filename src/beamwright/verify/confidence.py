"""Scores that need no second model: what the generator knew of its own tokens, or nothing.

A tree keeps the log-probability of each drawn token under the untempered distribution; the
statistics of the whole distribution that a scorer names in `token_stats` are computed for it and
kept beside (`protocols.ReadsTokenStats`). DeepConf: Fu et al. 2025, "Deep Think with Confidence".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from beamwright.errors import InputError
from beamwright.protocols import Verifier
from beamwright.tree import Node

DEFAULT_WINDOW = 128
_ENTROPY, _CONFIDENCE = "entropy", "confidence"
_BOTTOM = 10  # the lowest tenth of the groups


class LogprobVerifier:
    """A step's score is the geometric mean of its tokens' probabilities, in (0, 1]."""

    default_aggregate = "mean"
    probabilities = True

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [
            math.exp(sum(node.logprobs) / len(node.logprobs)) if node.logprobs else None
            for node in nodes
        ]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


class MinLogprobVerifier:
    """A step's score is the probability of its least likely token, in (0, 1]."""

    default_aggregate = "min"
    probabilities = True

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [math.exp(min(node.logprobs)) if node.logprobs else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


class EntropyVerifier:
    """A step's score is exp(-mean entropy of its tokens' distributions), in (0, 1].

    One over the number of equally likely tokens that the generator chose from, on (geometric)
    average; 1 where it had no choice.
    """

    default_aggregate = "mean"
    token_stats = frozenset({_ENTROPY})
    probabilities = True

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [
            math.exp(-_mean(node.stats[_ENTROPY])) if node.token_ids else None for node in nodes
        ]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


def group_confidences(confidences: Sequence[float], window: int) -> list[float]:
    """Mean confidence of every `window` tokens in a row; a shorter path is one group."""
    size = min(window, len(confidences))
    sums = list(accumulate(confidences, initial=0.0))
    return [(after - before) / size for before, after in zip(sums, sums[size:], strict=False)]


def lowest_group(confidences: Sequence[float], window: int) -> float:
    """DeepConf's lowest group confidence."""
    return min(group_confidences(confidences, window))


def bottom_groups(confidences: Sequence[float], window: int) -> float:
    """DeepConf's bottom-10% group confidence: the mean of the lowest tenth, at least of one."""
    groups = sorted(group_confidences(confidences, window))
    return _mean(groups[: max(1, len(groups) // _BOTTOM)])


def tail(confidences: Sequence[float], window: int) -> float:
    """DeepConf's tail confidence: the mean of the last `window` tokens."""
    return _mean(confidences[-window:])


class DeepConfVerifier:
    """DeepConf's confidence of the path so far; the last step's score is that of the whole path.

    window: tokens of a group. measure: `lowest_group`, `bottom_groups` or `tail`.
    The score is the published number itself: positive, and a mean of token confidences, which
    start at the log of 20 (`decode.sampling.confidence`) and have no upper end. Squeezing it into
    [0, 1] would change the weights of a vote.
    """

    default_aggregate = "last"
    probabilities = False
    token_stats = frozenset({_CONFIDENCE})

    def __init__(
        self,
        window: int = DEFAULT_WINDOW,
        measure: Callable[[Sequence[float], int], float] = lowest_group,
    ) -> None:
        self.window, self.measure = window, measure

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [self._score(node) if node.token_ids else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""

    def _score(self, node: Node) -> float:
        steps = [each for each in node.reply() if each.token_ids]
        values = [value for each in steps for value in each.stats[_CONFIDENCE]]
        return self.measure(values, self.window)


class NoVerifier:
    """No opinion: every score is None, and order falls back to lineage."""

    default_aggregate = "last"
    probabilities = False

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [None for _ in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(make: Callable[[], Verifier]) -> Callable[[str | None], Verifier]:
    def made(option: str | None) -> Verifier:
        if option is not None:
            raise InputError(f"--verifier: {option!r} follows a scorer that takes no option")
        return make()

    return made


def _deepconf(
    name: str, measure: Callable[[Sequence[float], int], float]
) -> Callable[[str | None], Verifier]:
    def made(option: str | None) -> Verifier:
        if option is None:
            return DeepConfVerifier(measure=measure)
        if not option.isdecimal() or int(option) < 1:
            raise InputError(
                f"--verifier {name}:{option}: the window is a positive number of tokens"
            )
        return DeepConfVerifier(int(option), measure)

    return made


WITHOUT_MODEL: dict[str, Callable[[str | None], Verifier]] = {
    "none": _plain(NoVerifier),
    "logprob": _plain(LogprobVerifier),
    "min-logprob": _plain(MinLogprobVerifier),
    "entropy": _plain(EntropyVerifier),
    "deepconf": _deepconf("deepconf", lowest_group),
    "deepconf-bottom": _deepconf("deepconf-bottom", bottom_groups),
    "deepconf-tail": _deepconf("deepconf-tail", tail),
}
"""Scorers by name; each is made from what follows the name and a colon, or None."""
