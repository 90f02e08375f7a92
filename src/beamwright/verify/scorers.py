"""Scores that need no second model: what the generator knew of its own tokens, a user's own code.

A tree keeps the log-probability of each drawn token under the untempered distribution; the
statistics of the whole distribution that a scorer names in `token_stats` are computed for it and
kept beside (`protocols.Traits`). DeepConf: Fu et al. 2025, "Deep Think with Confidence".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, get_args

from beamwright.errors import InputError, error_line
from beamwright.protocols import Traits, Verifier, traits_of
from beamwright.tree import Node, Sees

_ENTROPY, _CONFIDENCE = "entropy", "confidence"
_BOTTOM = 10  # the lowest tenth of the groups

Measure = Callable[[Sequence[float], int], float]
ScoreFunction = Callable[[str, list[str]], float | None]
"""From the problem's text and the texts of a path's steps to the score of the last one."""


class StepScorer:
    """Scores a step by what is on its node: nothing is kept.

    measure: from a node to its score. token_stats, sees: see `protocols.Traits`.
    """

    def __init__(
        self,
        measure: Callable[[Node], float | None],
        aggregate: str = "last",
        *,
        probabilities: bool = False,
        token_stats: Sequence[str] = (),
        sees: Sees = "both",
    ) -> None:
        self._measure, self.default_aggregate = measure, aggregate
        self.probabilities = probabilities
        self.traits = Traits(frozenset(token_stats), reads_drawn=True, sees=sees)

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step."""
        return [self._measure(node) for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept on the nodes."""


# --- DeepConf --------------------------------------------------------------------------------


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


def deepconf(window: int = 128, measure: Measure = lowest_group) -> StepScorer:
    """DeepConf's confidence of the path so far; the last step's score is that of the whole path.

    window: tokens of a group. measure: `lowest_group`, `bottom_groups` or `tail`.
    The score is the published number itself: positive, and a mean of token confidences, which
    start at the log of 20 (`engine.sampling.confidence`) and have no upper end. Squeezing it into
    [0, 1] would change the weights of a vote.
    """

    def confidence(node: Node) -> float | None:
        if not node.token_ids:
            return None
        drawn = [value for step in node.reply() for value in step.stats.get(_CONFIDENCE, ())]
        return measure(drawn, window) if drawn else None

    return StepScorer(confidence, token_stats=[_CONFIDENCE])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _exp(of: Callable[[Sequence[float]], float], drawn: Sequence[float]) -> float | None:
    """A probability, in (0, 1]; None of a step without tokens."""
    return math.exp(of(drawn)) if drawn else None


_probability = partial(StepScorer, probabilities=True)
_PLAIN: dict[str, Callable[[], StepScorer]] = {
    # No opinion: order falls back to lineage.
    "none": partial(StepScorer, lambda _: None, sees="answer"),
    # The geometric mean of the tokens' probabilities, and the least of them.
    "logprob": partial(_probability, lambda node: _exp(_mean, node.logprobs), "mean"),
    "min-logprob": partial(_probability, lambda node: _exp(min, node.logprobs), "min"),
    # One over the number of equally likely tokens that the generator chose from, on (geometric)
    # average: 1 where it had no choice.
    "entropy": partial(
        _probability,
        lambda node: _exp(lambda drawn: -_mean(drawn), node.stats.get(_ENTROPY, ())),
        "mean",
        token_stats=[_ENTROPY],
    ),
}
_MEASURES: dict[str, Measure] = {
    "deepconf": lowest_group,
    "deepconf-bottom": bottom_groups,
    "deepconf-tail": tail,
}
PROBE = "probe"
"""`probe:HEAD`: a head on the generator's own hidden states, `verify.probe`."""
WITHOUT_MODEL = (*_PLAIN, *_MEASURES, PROBE)


def scorer(name: str, option: str | None) -> Verifier:
    """The scorer of a name in `WITHOUT_MODEL` but `PROBE`. option: what follows it and a colon.

    Raises:
        InputError: for an option that it does not take.
    """
    if name in _PLAIN:
        if option is not None:
            raise InputError(f"--verifier: {option!r} follows a scorer that takes no option")
        return _PLAIN[name]()
    if option is None:
        return deepconf(measure=_MEASURES[name])
    if not option.isdecimal() or int(option) < 1:
        raise InputError(f"--verifier {name}:{option}: the window is a positive number of tokens")
    return deepconf(int(option), _MEASURES[name])


# --- a user's own ----------------------------------------------------------------------------


class CallableVerifier(StepScorer):
    """Scores a step by `function(problem, steps)`.

    steps: the path's steps without the empty ones, delimiters included; an empty step is not
    scored. The function may return None for no opinion. aggregate: steps to a path's score.
    """

    def __init__(self, function: ScoreFunction, aggregate: str = "last") -> None:
        super().__init__(self._score, aggregate)
        self.function, self.traits = function, _traits(function)
        self.name = getattr(function, "__name__", type(function).__name__)

    def _score(self, node: Node) -> float | None:
        """Raises InputError if the function does, or returns what is no finite number."""
        if not node.step_text.strip():
            return None
        seen = (step for step in node.reply() if step.seen(self.traits.sees))
        steps = [step.step_text for step in seen if step.step_text.strip()]
        where = f"verifier {self.name} on problem {node.problem_id}, step {node.depth}"
        try:
            value: Any = self.function(node.root.problem_text, steps)
        except Exception as error:  # whatever a user's function raises
            raise InputError(f"{where}: it raised {error_line(error)}") from error
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = type(value).__name__
            raise InputError(f"{where}: it returned {kind}, not a number of a float") from error
        if not math.isfinite(number):
            raise InputError(f"{where}: it returned {number}, not a finite number")
        return number


class ObjectVerifier:
    """A verifier of the user's own, with the usual answers to what it does not say.

    listwise: unless it says that scores are each their own, or that it may be called beside
    decoding, where batches are as they come. reads_drawn: if it asks for statistics of tokens.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = str(getattr(function, "name", type(function).__name__))
        self.default_aggregate: str = getattr(function, "default_aggregate", "last")
        self.probabilities = bool(getattr(function, "probabilities", False))
        said = _traits(function)
        usual = {"reads_drawn": bool(said.token_stats), "listwise": not said.beside_decoding}
        self.traits = traits_of(function, **usual)

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """What the user's object answers.

        Raises:
            InputError: if it raises.
        """
        try:
            return list(self.function.score(nodes))
        except Exception as error:  # whatever a user's object raises
            raise InputError(f"verifier {self.name}: it raised {error_line(error)}") from error

    def release(self, nodes: Sequence[Node]) -> None:
        release: Callable[[Sequence[Node]], None] | None = getattr(self.function, "release", None)
        if release is not None:
            release(nodes)


def _traits(function: Any) -> Traits:
    """What a user's code says of itself. Raises InputError for what `sees` cannot be."""
    traits = traits_of(function)
    if traits.sees not in get_args(Sees):
        parts = ", ".join(get_args(Sees))
        raise InputError(f"verifier: sees is one of {parts}, not {traits.sees!r:.40}")
    return traits
