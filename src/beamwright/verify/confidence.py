"""Scores that need no second model: the generator's own log-probabilities, or nothing.

The log-probability is that of each sampled token under the untempered distribution; the rest of
the distribution is not kept, so there is no entropy and no top-k confidence here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from beamwright.errors import InputError
from beamwright.protocols import Verifier
from beamwright.tree import Node

DEFAULT_WINDOW = 128


class LogprobVerifier:
    """A step's score is the geometric mean of its tokens' probabilities, in (0, 1]."""

    default_aggregate = "mean"
    probabilities = True

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """See `protocols.Verifier`."""
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
        """See `protocols.Verifier`."""
        return [math.exp(min(node.logprobs)) if node.logprobs else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


class DeepConfVerifier:
    """The lowest group confidence of a path so far, after DeepConf, in (0, 1].

    A group is a window of this many tokens; its confidence is the geometric mean of their
    probabilities; a path shorter than one window is one group. So the last step's score is that
    of the whole path. DeepConf itself averages over each token's likeliest alternatives, which are
    not kept; this uses the token that was drawn.
    """

    default_aggregate = "last"
    probabilities = True

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self.window = window

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """See `protocols.Verifier`."""
        return [self._lowest(node) if node.logprobs else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""

    def _lowest(self, node: Node) -> float:
        logprobs = [value for each in node.path() for value in each.logprobs]
        window = min(self.window, len(logprobs))
        sums = list(accumulate(logprobs, initial=0.0))
        groups = zip(sums, sums[window:], strict=False)
        return math.exp(min(0.0, min(after - before for before, after in groups) / window))


class NoVerifier:
    """No opinion: every score is None, and order falls back to lineage."""

    default_aggregate = "last"
    probabilities = False

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """See `protocols.Verifier`."""
        return [None for _ in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


def _plain(make: Callable[[], Verifier]) -> Callable[[str | None], Verifier]:
    def made(option: str | None) -> Verifier:
        if option is not None:
            raise InputError(f"--verifier: {option!r} follows a scorer that takes no option")
        return make()

    return made


def _deepconf(option: str | None) -> Verifier:
    if option is None:
        return DeepConfVerifier()
    if not option.isdecimal() or int(option) < 1:
        raise InputError(f"--verifier deepconf:{option}: the window is a positive number of tokens")
    return DeepConfVerifier(int(option))


WITHOUT_MODEL: dict[str, Callable[[str | None], Verifier]] = {
    "none": _plain(NoVerifier),
    "logprob": _plain(LogprobVerifier),
    "min-logprob": _plain(MinLogprobVerifier),
    "deepconf": _deepconf,
}
"""Scorers by name; each is made from what follows the name and a colon, or None."""
